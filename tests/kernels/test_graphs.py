"""What is compiled, copied or captured notices that a module was changed since."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.components.dense_models import B, T, make_model, sequence
from torch import Tensor, nn

from rl_lab.components.actors.dreamer import make_actor
from rl_lab.components.world_models.base import Dream
from rl_lab.kernels import deferred, graphs
from rl_lab.kernels.deferred import observe
from rl_lab.kernels.dreams import DeferredDream
from rl_lab.kernels.graphs import CapturedStep, Watch, compile_block
from rl_lab.nn.layers import NormedLinear
from rl_lab.specs import ActionSpec


def hook(layer: NormedLinear) -> None:
    layer.linear.register_forward_hook(lambda module, inputs, output: 0.5 * output)


def hook_of_inputs(layer: NormedLinear) -> None:
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0].flip(-1),))


def swap_layer(layer: NormedLinear) -> None:
    layer.linear = type(layer.linear)(layer.linear.in_features, layer.linear.out_features)


def swap_activation(layer: NormedLinear) -> None:
    layer.activate = torch.tanh


def replace_method(layer: NormedLinear) -> None:
    layer.norm.forward = lambda x: x


def replace_parameter(layer: NormedLinear) -> None:
    layer.linear.weight = nn.Parameter(torch.ones_like(layer.linear.weight))


CHANGES = [hook, hook_of_inputs, swap_layer, swap_activation, replace_method, replace_parameter]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_a_module_are_seen(change: Callable[[NormedLinear], None]) -> None:
    """A captured step then is captured anew."""
    layer, other = NormedLinear(4, 4), NormedLinear(4, 4)
    watch = Watch([other, layer])
    change(layer)
    assert watch.changed()


def test_a_function_in_place_of_nothing_is_seen() -> None:
    """The number of attributes stays the same then."""
    layer = NormedLinear(4, 4)
    layer.transform = None
    watch = Watch([layer])
    layer.transform = torch.tanh
    assert watch.changed()


def test_learning_changes_nothing() -> None:
    """Nor does the choice of kernels, or what a module notes of itself."""
    layer = NormedLinear(4, 4)
    watch = Watch([layer])
    with torch.no_grad():
        layer.linear.weight += 1.0
    layer(torch.ones(1, 4)).sum().backward()
    layer.note = 3
    assert not watch.changed()
    removable = layer.register_forward_hook(lambda *_: None)
    assert watch.changed()
    removable.remove()
    assert not watch.changed()


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="needs the compiler")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_compiled_piece_computes_what_the_module_is_now(
    change: Callable[[NormedLinear], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it was changed after the first call."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiler(function, backend="eager", dynamic=False))
    torch._dynamo.reset()
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    layer.linear, layer.norm, layer.activate = layer[0], layer[1], torch.relu

    def piece(x: Tensor) -> Tensor:
        return layer.activate(layer(x))

    compiled = compile_block(piece)
    torch.testing.assert_close(compiled(x), piece(x))
    if change is swap_layer:
        layer[0] = nn.Linear(4, 4)
    else:
        change(layer)  # type: ignore[arg-type]
    torch.testing.assert_close(compiled(x), piece(x))


def test_what_cannot_be_compiled_runs_as_it_is_written() -> None:
    """Not less: it prints, and its result is right, at every call. A warning says why it is slow."""
    torch._dynamo.reset()
    seen: list[float] = []

    def piece(x: Tensor) -> Tensor:
        seen.append(float(np.linalg.norm(x.tolist())))
        return 2.0 * x

    compiled = compile_block(piece)
    with pytest.warns(UserWarning, match="piece is not compiled"):
        torch.testing.assert_close(compiled(torch.ones(4)), torch.full((4,), 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        compiled(torch.zeros(4))
    assert seen == [2.0, 0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_cannot_be_captured_is_called_each_time() -> None:
    """A copy from the host spoils a graph; the state is as if nobody had tried, and random numbers go on."""
    state = torch.zeros(2, device="cuda")

    def step(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        state.add_(inputs["x"] * torch.tensor([1.0, 2.0]).to("cuda"))
        return {"noise": torch.rand(2, device="cuda")}

    captured = CapturedStep(step, lambda: [state], modules=[])
    torch.cuda.manual_seed(3)
    expected = torch.stack([torch.rand(2, device="cuda") for _ in range(2)])
    torch.cuda.manual_seed(3)
    with pytest.warns(UserWarning, match="not captured"):
        first = captured({"x": torch.ones(2)})["noise"]
    second = captured({"x": torch.ones(2)})["noise"]
    torch.testing.assert_close(torch.stack([first, second]), expected)
    assert state.tolist() == [2.0, 4.0]
    other = CapturedStep(lambda inputs: {"y": inputs["x"] + torch.rand(2, device="cuda")}, list, modules=[])
    assert (other({"x": torch.ones(2)})["y"] > 1.0).all()  # the next capture succeeds
    assert other._graph is not None


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_enabled", False)


@pytest.mark.usefixtures("_uncompiled")
def test_dreams_on_copies_are_those_of_the_present_modules() -> None:
    """After learning, a hook of the model, another activation of the actor, and without the hook again."""
    model = make_model("dreamer_v1").float()
    actor: Any = make_actor(action=ActionSpec("continuous", (2,)), feature_size=model.feature_size, units=8, layers=1)
    dreams = DeferredDream(model, actor, torch.float32, Dream.of)
    start = model.initial(B)
    noise = model.draw_noise((3, B), "cpu"), actor.draw_noise((3, B), "cpu")
    seen = []

    def check() -> None:
        with torch.no_grad():
            plain = model.imagine(
                start, lambda features, noise: actor.distribution(actor(features)).sample(noise),
                latent_noise=noise[0], action_noise=noise[1],
            )  # fmt: skip
        dream = dreams(start, *noise)
        torch.testing.assert_close(dream.actions.detach(), plain.actions)
        torch.testing.assert_close(dream.features.detach(), plain.features)
        seen.append(plain.features)

    check()
    with torch.no_grad():
        actor.head.outputs[0].weight += 1.0
    check()
    hook = model.prior_head.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    check()
    actor.head.trunk[0].activate = torch.tanh
    check()
    hook.remove()
    check()
    assert len({float(features.sum()) for features in seen}) == len(seen), "each change is seen in the plain dream"


@pytest.mark.usefixtures("_uncompiled")
def test_deferred_filtering_follows_a_swapped_layer() -> None:
    """One of the same class, for which the kernel still holds."""
    model = make_model("planet").float()
    data: dict[str, Any] = sequence(model)
    data |= {name: data[name].float() for name in ("embed", "prev_action", "noise")}
    data["initial"] = data["initial"].map(Tensor.float)
    observe(model, **data)
    assert model in deferred._filterings
    model.input_layer = NormedLinear(6, 7, style=model.prior_head.trunk.style)
    states, _ = observe(model, **data)
    torch.testing.assert_close(states.deter, model.observe(**data)[0].deter)
    assert states.deter.shape == (B, T, model.deter)

"""When a kernel stands in for a plain method, and when it steps aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.small_model import CALLS, KERNEL, BelowUnchanged, Named, Small, Steeper, Unchanged
from torch import nn
from torch.nn.utils import parametrize

from rl_lab.experiment.plan import path_lines
from rl_lab.kernels import registry, sources
from rl_lab.kernels.registry import Decision, chosen_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one there is is that of the small model."""
    monkeypatch.setattr(registry, "KERNELS", (KERNEL,))
    monkeypatch.setattr(registry, "is_installed", lambda package: True)
    prints = {name: sources._fingerprint_of(sources.find(name)) for name in KERNEL.mirrors}
    monkeypatch.setattr(sources, "recorded", lambda: prints)
    CALLS.clear()


def enable(model: nn.Module, mode: str = "auto") -> list[Decision]:
    return registry.enable({"part": model}, device=CPU, mode=mode)


def runs_on_its_kernel(model: nn.Module) -> bool:
    """Whether the kernel is called."""
    CALLS.clear()
    model(torch.ones(2, model.size))
    return CALLS == ["fast"]


def test_the_exact_class_takes_the_kernel() -> None:
    """The plan has a line for it; without being enabled it runs its plain method."""
    model = Small()
    assert not runs_on_its_kernel(model)
    plain = model(torch.ones(2, 3))
    decisions = enable(model)
    assert [str(decision) for decision in decisions] == ["part.forward: cpu kernel"]
    assert runs_on_its_kernel(model)
    assert torch.equal(model(torch.ones(2, 3)), plain)
    assert chosen_kernels(nn.Sequential(model)) == ["Small.forward"]


def test_parts_are_found_inside_others_and_once_each() -> None:
    """Under the path that they have in the first part that holds them."""
    shared = Small()
    outer = nn.ModuleDict({"first": shared, "second": Small()})
    decisions = registry.enable({"model": outer, "other": shared}, device=CPU)
    assert [decision.part for decision in decisions] == ["model.first.forward", "model.second.forward"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Steeper, "Steeper overrides squash"), (Named, "Named is a class of its own"), (Unchanged, None),
     (BelowUnchanged, "BelowUnchanged is a class of its own")],
)  # fmt: skip
def test_subclasses(kind: type[Small], reason: str | None) -> None:
    """Another class is another computation, unless it says of itself that it is not."""
    model = kind()
    (decision,) = enable(model)
    assert decision.reason == reason
    assert runs_on_its_kernel(model) == (reason is None)


def swap_layer(model: Small) -> None:
    model.layer = nn.Sequential(model.layer, nn.Dropout(0.0))


def add_layer(model: Small) -> None:
    model.further = nn.ReLU()


def subclass_layer(model: Small) -> None:
    model.layer = type("MyLinear", (nn.Linear,), {})(3, 3)


def parametrise(model: Small) -> None:
    parametrize.register_parametrization(model.layer, "weight", nn.Identity())


def replace_method(model: Small) -> None:
    model.squash = torch.sigmoid


def replace_layers_method(model: Small) -> None:
    model.layer.forward = lambda x: x


def hook(model: Small) -> None:
    model.register_forward_hook(lambda *_: None)


def hook_before_a_layer(model: Small) -> None:
    model.layer.register_forward_pre_hook(lambda *_: None)


def hook_of_gradients(model: Small) -> None:
    model.layer.register_full_backward_hook(lambda *_: None)


CHANGES = {
    swap_layer: "layer is a Sequential",
    add_layer: "further is a ReLU",
    subclass_layer: "layer is a MyLinear",
    parametrise: "layer is a ParametrizedLinear",
    replace_method: "Small.squash was replaced",
    replace_layers_method: "layer.forward was replaced",
    hook: "Small has a hook",
    hook_before_a_layer: "layer has a hook",
    hook_of_gradients: "layer has a hook",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_module_runs_its_plain_method(change: Callable[[Small], None], when: str) -> None:
    """Whether it was changed before kernels were chosen, which the plan then says, or at any time after."""
    model = Small()
    if when == "before":
        change(model)
        (decision,) = enable(model)
        assert decision.reason == CHANGES[change]
        assert str(decision) == f"part.forward: plain, because {CHANGES[change]}"
    else:
        enable(model)
        assert runs_on_its_kernel(model)
        change(model)
    assert not runs_on_its_kernel(model)


def test_a_hook_for_all_modules_is_honoured() -> None:
    model = Small()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert [decision.reason for decision in enable(model)] == ["a global module hook is registered"]
    finally:
        handle.remove()
    enable(model)
    assert runs_on_its_kernel(model)


def squash(self: Small, x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def test_an_edited_plain_method_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file, or replaced in the class: the kernel does not compute it."""
    model = Small()
    enable(model)
    with monkeypatch.context() as patch:
        patch.setattr(Small, "squash", squash)
        assert not runs_on_its_kernel(model)
        assert [decision.reason for decision in enable(model)] == ["Small.squash was edited"]
    monkeypatch.setattr(sources, "recorded", lambda: {})
    assert [decision.reason for decision in enable(model)] == ["Small.forward was edited"]
    assert not runs_on_its_kernel(model)


def test_off_chooses_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where kernels were on before."""
    model = Small()
    enable(model)
    monkeypatch.setattr(type(KERNEL), "load", lambda self: pytest.fail("a kernel was loaded"))
    monkeypatch.setattr(type(KERNEL), "supports", lambda self, module: pytest.fail("a kernel was asked"))
    (decision,) = enable(model, mode="off")
    assert str(decision) == "part.forward: plain, because training.kernels=off"
    assert not runs_on_its_kernel(model)


def test_what_a_kernel_cannot_take_is_its_own_to_say() -> None:
    model = Small(8)
    assert [decision.reason for decision in enable(model)] == ["it is too large"]
    assert not runs_on_its_kernel(model)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda package: False)
    assert [decision.reason for decision in enable(Small())] == ["numba is not installed"]


def test_kernels_of_another_device_are_not_spoken_of() -> None:
    assert registry.enable({"part": Small()}, device=torch.device("cuda")) == []


def test_a_saved_state_knows_nothing_of_kernels() -> None:
    model = Small()
    names = list(model.state_dict())
    enable(model)
    assert list(model.state_dict()) == names


def test_the_lines_of_a_plan() -> None:
    """One for each part, or one that says why there are none."""
    decisions = registry.enable({"fast": Small(), "own": Steeper(), "large": Small(8)}, device=CPU)
    lines = path_lines(decisions, compiling=False, kernels="auto")
    assert lines[-3:] == [
        "fast.forward: cpu kernel",
        "own.forward: plain, because Steeper overrides squash",
        "large.forward: plain, because it is too large",
    ]
    assert path_lines(enable(Small(), "off"), compiling=False, kernels="off")[-1] == (
        "kernels: none, because training.kernels=off"
    )
    assert path_lines([], compiling=False, kernels="auto")[-1] == (
        "kernels: none, because no part has one on this device"
    )

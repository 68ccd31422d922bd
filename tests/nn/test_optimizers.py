"""LaProp and AGC against a slow, literal reference."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor, nn

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.nn.optimizers import LaProp, Stepper, gradient_step, torch_optimizer

SHAPES = ((5, 3), (70,), (2, 3, 50), (1,))


def make_parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    parameters[1].data.zero_()  # like a fresh bias: AGC works with its floor
    return parameters


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def set_gradients(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()


def updates(optimizer: LaProp) -> list[int]:
    """How many each tensor has had."""
    return optimizer.state_dict()["updates"][0].tolist()


def literal_laprop(values: list[Tensor], steps: int, lr: float, warmup: int, agc: float | None) -> list[Tensor]:
    """The formulas one by one, in float64."""
    values = [value.double() for value in values]
    m = [torch.zeros_like(value) for value in values]
    v = [torch.zeros_like(value) for value in values]
    for t in range(1, steps + 1):
        for k, g in enumerate(gradients(t, scale=0.1 * t)):
            g = g.double()
            if agc is not None:
                g = g / max(1.0, (g.norm() / (agc * max(1e-3, values[k].norm().item()))).item())
            v[k] = 0.999 * v[k] + 0.001 * g**2
            u = g / ((v[k] / (1 - 0.999**t)).sqrt() + 1e-20)
            m[k] = 0.9 * m[k] + 0.1 * u
            values[k] = values[k] - lr * min(1.0, (t - 1) / warmup) * m[k] / (1 - 0.9**t)
    return values


@pytest.mark.parametrize("agc", [0.3, None])
def test_matches_the_literal_formulas(agc: float | None) -> None:
    """AGC → RMS → momentum → learning rate with warm-up, over 12 updates."""
    parameters = make_parameters()
    start = [p.detach().clone() for p in parameters]
    optimizer = LaProp(parameters, lr=1e-2, warmup=5, agc=agc)
    for t in range(1, 13):
        set_gradients(parameters, gradients(t, scale=0.1 * t))
        optimizer.step()
    expected = literal_laprop(start, 12, 1e-2, 5, agc)
    for got, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(got.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_parameter_groups_have_their_own_settings() -> None:
    """Two groups behave as two optimisers."""
    together, apart = make_parameters(), make_parameters()
    both = LaProp([{"params": together[:2]}, {"params": together[2:], "lr": 1e-3}], lr=1e-2, warmup=0)
    first, second = LaProp(apart[:2], lr=1e-2, warmup=0), LaProp(apart[2:], lr=1e-3, warmup=0)
    for t in range(3):
        set_gradients(together, gradients(t))
        set_gradients(apart, gradients(t))
        both.step()
        first.step()
        second.step()
    for left, right in zip(together, apart, strict=True):
        assert torch.equal(left, right)


def test_agc_allows_a_zero_tensor_a_small_gradient() -> None:
    """The parameter's norm counts as at least 1e-3, and norms are of whole tensors: 0.3 · 1e-3 is what is left."""
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = LaProp([parameter], lr=1.0, warmup=0, betas=(0.9, 0.0))
    parameter.grad = torch.full((4,), 100.0)
    optimizer.step()
    clipped = optimizer.state_dict()["second_moment"][0].sqrt()  # betas[1] = 0: the last squared gradient
    assert clipped[:4].norm().item() == pytest.approx(3e-4, rel=1e-5)
    assert optimizer.last_grad_norm.item() == pytest.approx(200.0)  # reported before clipping


def learning_rates(count: int, **settings: float) -> list[float]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = LaProp([parameter], **settings)
    rates = []
    for _ in range(count):
        parameter.grad = torch.ones(2)
        optimizer.step()
        rates.append(optimizer.last_learning_rate.item())
    return rates


def test_learning_rate_rises_then_falls_to_its_end() -> None:
    """Linear warm-up from 0 on, as optax has it, then linear decay to `decay_to`, then constant."""
    rates = learning_rates(11, lr=1.0, warmup=4, decay_to=0.2, decay_updates=4)
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert learning_rates(4, lr=1.0, warmup=2) == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert learning_rates(3, lr=1.0, warmup=0, decay_to=0.5, decay_updates=1) == pytest.approx([1.0, 0.5, 0.5])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_non_finite_gradient_changes_nothing(bad: float) -> None:
    """Parameters, moments and counters stay to the bit, and the next update is as if nothing had happened."""
    disturbed, calm = make_parameters(), make_parameters()
    optimizer, reference = LaProp(disturbed, lr=1e-2, warmup=2), LaProp(calm, lr=1e-2, warmup=2)
    for t in range(3):
        if t == 1:
            values = gradients(9)
            values[2][0, 0, 0] = bad
            set_gradients(disturbed, values)
            optimizer.step()
            assert not optimizer.last_finite
        set_gradients(disturbed, gradients(t))
        set_gradients(calm, gradients(t))
        optimizer.step()
        reference.step()
    for left, right in zip(disturbed, calm, strict=True):
        assert torch.equal(left, right)
    assert updates(optimizer) == [3] * len(SHAPES)
    assert optimizer.skipped.item() == 1


def test_non_finite_first_update_and_loss_change_nothing() -> None:
    """Also before any state exists, and when only the loss is not finite."""
    parameters = make_parameters()
    start = [p.detach().clone() for p in parameters]
    optimizer = LaProp(parameters)
    set_gradients(parameters, [torch.full(shape, math.nan) for shape in SHAPES])
    optimizer.step()
    set_gradients(parameters, gradients(0))
    optimizer.step(loss=torch.tensor(math.inf))
    for left, right in zip(parameters, start, strict=True):
        assert torch.equal(left, right)
    assert updates(optimizer) == [0] * len(SHAPES)
    assert optimizer.skipped.item() == 2


def test_state_survives_saving_without_code() -> None:
    """The state loads with weights_only into existing buffers, and training goes on to the bit."""
    straight, resumed = make_parameters(), make_parameters()
    optimizer = LaProp(straight, lr=1e-2)
    for t in range(3):
        set_gradients(straight, gradients(t))
        optimizer.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "parameters": straight}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for target, source in zip(resumed, saved["parameters"], strict=True):
        target.data.copy_(source)
    other = LaProp(resumed, lr=1e-2)
    address = other.state_dict()["momentum"][0].data_ptr()
    other.load_state_dict(saved["optimizer"])
    assert other.state_dict()["momentum"][0].data_ptr() == address
    for parameters, own in ((straight, optimizer), (resumed, other)):
        set_gradients(parameters, gradients(7))
        own.step()
    for left, right in zip(straight, resumed, strict=True):
        assert torch.equal(left, right)


def test_state_tensors_are_all_that_a_step_changes() -> None:
    """With the parameters they undo a step to the bit, as the warm-up of a CUDA graph needs."""
    parameters = make_parameters()
    optimizer = LaProp(parameters, warmup=0)
    results = []
    for _ in range(2):
        tensors = [*parameters, *optimizer.state_tensors()]
        before = [tensor.detach().clone() for tensor in tensors]
        set_gradients(parameters, gradients(1))
        optimizer.step()
        results.append([tensor.detach().clone() for tensor in tensors])
        with torch.no_grad():
            for tensor, saved in zip(tensors, before, strict=True):
                tensor.copy_(saved)
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_state_of_another_model_is_refused() -> None:
    optimizer = LaProp(make_parameters())
    with pytest.raises(CheckpointError, match="does not fit the model"):
        LaProp([nn.Parameter(torch.zeros(999))]).load_state_dict(optimizer.state_dict())


def test_parameter_without_gradient_counts_as_zero_gradient() -> None:
    parameters = make_parameters()
    before = parameters[0].detach().clone()
    optimizer = LaProp(parameters, warmup=0)
    set_gradients(parameters, gradients(0))
    parameters[0].grad = None
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert not torch.equal(parameters[2], make_parameters()[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"lr": 0.0}, "lr > 0"), ({"betas": (1.0, 0.9)}, "betas"), ({"decay_to": 1e-5}, "decay_updates"),
     ({"agc": 0.0}, "agc=0.0")],
)  # fmt: skip
def test_bad_settings_are_explained(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaProp(make_parameters(), **settings)


def test_a_step_of_some_tensors_leaves_the_others_as_they_are() -> None:
    """Each tensor's path, warm-up included, is that of an optimiser of its own that stepped as often."""
    parameters, alone = make_parameters(), make_parameters()
    optimizer, own = LaProp(parameters, lr=1e-2, warmup=3), [LaProp([p], lr=1e-2, warmup=3) for p in alone]
    for t, chosen in enumerate([(0, 2), (1, 3), (0, 1, 2, 3), (2,), (1, 2)]):
        set_gradients(parameters, gradients(t))
        set_gradients(alone, gradients(t))
        optimizer.step(only=[parameters[index] for index in chosen])
        for index in chosen:
            own[index].step()
    torch.testing.assert_close(parameters, alone)
    assert updates(optimizer) == [2, 3, 4, 2]


def two_sides() -> tuple[dict[str, nn.Module], nn.Module]:
    torch.manual_seed(0)
    sides = {"left": nn.Linear(3, 3), "right": nn.Linear(3, 1)}
    return sides, nn.Sequential(*sides.values())


@pytest.mark.parametrize("several", [False, True], ids=["one optimiser", "one for each side"])
def test_sides_step_alone_or_together(several: bool) -> None:
    """Of a network in two parts, with one LaProp for both or any optimiser for each."""
    sides, network = two_sides()
    if several:
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in sides.items()}
    else:
        optimizers = {"main": LaProp(network.parameters(), lr=0.1, warmup=0)}
    stepper = Stepper(optimizers, {name: [part] for name, part in sides.items()})
    for side in ("left", "right", None):
        before = {name: part.weight.detach().clone() for name, part in sides.items()}
        stepper.zero_grad()
        loss = network(torch.ones(2, 3)).square().sum()
        loss.backward()
        stepper.step(loss, side)
        moved = [name for name, part in sides.items() if not torch.equal(part.weight, before[name])]
        assert moved == (["left", "right"] if side is None else [side])
        names = [f"optimizer/{name}_grad_norm" for name in moved] if several else ["optimizer/grad_norm"]
        assert [name for name in stepper.metrics() if name.endswith("grad_norm")] == names


def test_a_side_that_was_left_out_is_told_of_though_the_other_one_moved() -> None:
    """Metrics are of all steps since they were asked for."""
    sides, network = two_sides()
    stepper = Stepper({"main": LaProp(network.parameters())}, {name: [part] for name, part in sides.items()})
    for side, loss in (("left", torch.tensor(torch.nan)), ("right", torch.tensor(0.0))):
        stepper.zero_grad()
        stepper.step(loss, side)
    assert stepper.metrics()["optimizer/nonfinite"].item() == 1.0
    assert stepper.metrics() == {}


def test_an_optimiser_of_both_sides_that_cannot_step_one_is_refused() -> None:
    sides, network = two_sides()
    stepper = Stepper({"main": torch.optim.AdamW(network.parameters())}, {"left": [sides["left"]]})
    loss = network(torch.ones(2, 3)).sum()
    loss.backward()
    with pytest.raises(ConfigError, match=r"optimizers\.main holds .* AdamW cannot step one of them alone"):
        stepper.step(loss, "left")


def test_any_optimiser_leaves_out_an_update_that_is_not_finite() -> None:
    """As RL Lab's own ones do."""
    _, network = two_sides()
    stepper = Stepper({"main": torch.optim.AdamW(network.parameters(), lr=0.1)}, {"all": [network]})
    before = [value.detach().clone() for value in network.parameters()]
    loss = network(torch.full((2, 3), torch.inf)).sum()
    loss.backward()
    stepper.step(loss)
    assert stepper.metrics()["optimizer/nonfinite"].item() == 1.0
    assert all(torch.equal(left, right) for left, right in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_torch_optimizers_by_name(clip: float | None) -> None:
    """Torch's own step, after the gradient was scaled down to the limit; the norm before it is reported."""
    ours, theirs = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    x = torch.full((4, 3), 5.0)
    optimizer = torch_optimizer(ours.parameters(), name="RMSprop", clip=clip, lr=0.1, alpha=0.9)
    metrics = gradient_step(optimizer, ours(x).square().mean())
    plain = torch.optim.RMSprop(theirs.parameters(), lr=0.1, alpha=0.9)
    theirs(x).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), float("inf") if clip is None else clip)
    plain.step()
    torch.testing.assert_close(metrics["grad_norm"], norm)
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


def test_unknown_torch_optimizer() -> None:
    """The message has the nearest name."""
    with pytest.raises(ConfigError, match="RMSprop"):
        torch_optimizer(torch.nn.Linear(1, 1).parameters(), name="RMSProp", clip=None, lr=0.1)

"""LaProp and AGC against a slow, literal reference."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor, nn

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.nn.optimizers import LaProp

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
            values[k] = values[k] - lr * min(1.0, t / warmup) * m[k] / (1 - 0.9**t)
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
    """Linear warm-up, then linear decay to `decay_to`, then constant."""
    rates = learning_rates(10, lr=1.0, warmup=4, decay_to=0.2, decay_updates=4)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert learning_rates(3, lr=1.0, warmup=2) == pytest.approx([0.5, 1.0, 1.0])


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
    assert optimizer.updates.item() == 3
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
    assert optimizer.updates.item() == 0
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
    optimizer = LaProp(parameters, warmup=2)
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

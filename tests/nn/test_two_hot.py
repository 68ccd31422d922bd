"""Two-hot against the literal definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import TwoHot


def literal_target(value: float, bins: list[float]) -> list[float]:
    """The definition, one number at a time."""
    target = [0.0] * len(bins)
    below = max((k for k, b in enumerate(bins) if b <= value), default=0)
    above = min(below + 1, len(bins) - 1) if value >= bins[0] else 0
    if below == above:
        target[below] = 1.0
        return target
    down, up = abs(bins[below] - value), abs(bins[above] - value)
    target[below], target[above] = up / (down + up), down / (down + up)
    return target


def literal_loss(logits: Tensor, value: float, bins: Tensor) -> float:
    target = torch.tensor(literal_target(value, bins.double().tolist()), dtype=torch.float64)
    return -(target * torch.log_softmax(logits.double(), -1)).sum().item()


def test_bins_are_symmetric_with_an_exact_zero() -> None:
    """255 values, symexp-spaced, from -symexp(20) to symexp(20)."""
    bins = TwoHot().bins
    assert bins.shape == (255,)
    assert bins[127] == 0.0
    assert torch.equal(bins, -bins.flip(0))
    assert bins[-1].item() == pytest.approx(math.expm1(20.0))
    assert bins[128].item() == pytest.approx(math.expm1(20.0 / 127.0), rel=1e-5)


@pytest.mark.parametrize(("bins", "limit"), [(255, 20.0), (63, 8.0), (3, 1.0)])
def test_uniform_prediction_is_exactly_zero(bins: int, limit: float) -> None:
    """However large the outer bins are: the sum is symmetric."""
    two_hot = TwoHot(bins, limit)
    for logits in (torch.zeros(4, bins), torch.full((4, bins), 3.7)):
        assert torch.equal(two_hot.mean(logits), torch.zeros(4))


def test_mean_is_the_expectation_in_raw_space() -> None:
    two_hot = TwoHot(63, 8.0)
    logits = torch.randn(5, 63) * 3
    expected = (torch.softmax(logits.double(), -1) * two_hot.bins.double()).sum(-1)
    torch.testing.assert_close(two_hot.mean(logits).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.05, -0.05, 1.0, -3.3, 1234.5, -1e7, 1e12, -1e12])
def test_loss_equals_the_literal_cross_entropy(value: float) -> None:
    """Between bins, on a bin, and beyond both ends."""
    torch.manual_seed(0)
    two_hot = TwoHot()
    logits = torch.randn(255) * 2
    got = two_hot.loss(logits, torch.tensor(value)).item()
    assert got == pytest.approx(literal_loss(logits, value, two_hot.bins), rel=1e-5)


def test_loss_on_each_bin_is_a_plain_cross_entropy() -> None:
    """A value that is a bin puts all mass on it: the ends included."""
    two_hot = TwoHot(21, 5.0)
    logits = torch.randn(21, 21)
    expected = -torch.log_softmax(logits, -1).diagonal()
    torch.testing.assert_close(two_hot.loss(logits, two_hot.bins), expected)


def test_first_loss_is_ln_of_the_number_of_bins() -> None:
    loss = TwoHot().loss(torch.zeros(7, 255), torch.randn(7) * 100)
    torch.testing.assert_close(loss, torch.full((7,), math.log(255.0)))


def test_gradient_is_probability_minus_target() -> None:
    two_hot = TwoHot(21, 5.0)
    logits = torch.randn(21, requires_grad=True)
    target = torch.tensor(0.7, requires_grad=True)
    two_hot.loss(logits, target).backward()
    expected = torch.softmax(logits.detach(), -1) - torch.tensor(literal_target(0.7, two_hot.bins.tolist()))
    torch.testing.assert_close(logits.grad, expected)
    assert target.grad is None  # the target is a constant


def test_fitting_the_loss_recovers_the_target() -> None:
    """Logits that minimise the loss predict the target: two-hot loses nothing of the mean."""
    two_hot = TwoHot(63, 8.0)
    target = torch.tensor([-250.0, -0.3, 0.0, 0.01, 17.0])
    masses = torch.tensor([literal_target(y, two_hot.bins.tolist()) for y in target.tolist()])
    torch.testing.assert_close(two_hot.mean(masses.clamp(min=1e-30).log()), target, rtol=1e-4, atol=1e-5)


def test_half_precision_logits_are_raised_to_float32() -> None:
    loss = TwoHot().loss(torch.zeros(2, 255, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32


def test_bins_are_not_saved() -> None:
    assert TwoHot().state_dict() == {}


@pytest.mark.parametrize(("bins", "limit", "message"), [(4, 20.0, "odd number"), (5, 0.0, "positive")])
def test_bad_settings_are_explained(bins: int, limit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwoHot(bins, limit)


@pytest.mark.parametrize("value", [-1e6, -3.7, -0.01, 0.0, 0.4, 12.0, 5e9])
def test_linear_bins_stand_for_symlog_values(value: float) -> None:
    """The form of 2023: equally spaced bins, the target squashed, the prediction symexp of the mean."""
    two_hot, logits = TwoHot(11, 5.0, "linear"), torch.randn(11)
    bins = torch.linspace(-5.0, 5.0, 11)
    torch.testing.assert_close(two_hot.bins, bins)
    squashed = min(max(math.copysign(math.log1p(abs(value)), value), -5.0), 5.0)
    assert two_hot.loss(logits, torch.tensor(value)).item() == pytest.approx(
        literal_loss(logits, squashed, bins), rel=1e-4
    )
    mean = (logits.softmax(-1) * bins).sum()
    torch.testing.assert_close(two_hot.mean(logits), torch.sign(mean) * torch.expm1(mean.abs()))


def test_several_targets_have_the_losses_and_gradients_of_each() -> None:
    """On the CPU one softmax serves them all, and the derivative is written out; under autocast it is autograd's."""
    two_hot, logits = TwoHot(21), torch.randn(3, 4, 21, requires_grad=True)
    targets, weights = [torch.randn(3, 4), 5.0 * torch.randn(3, 4)], [0.3, 2.0]
    forms = [two_hot.losses(logits, *targets), [two_hot.loss(logits, target) for target in targets]]
    with torch.autocast("cpu"):
        forms.append(two_hot.losses(logits, *targets))
    gradients = []
    for losses in forms:
        torch.testing.assert_close(losses, forms[0])
        total = sum(weight * loss.sum() for weight, loss in zip(weights, losses, strict=True))
        gradients.append(torch.autograd.grad(total, logits)[0])
    torch.testing.assert_close(gradients[1:], [gradients[0]] * 2)

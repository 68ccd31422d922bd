"""PPO's advantages and losses against their definitions, one number at a time."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.losses.policy_gradient import clipped_surrogate, gae, kl_estimate, normalize, value_loss


def test_gae_is_the_recursion_of_the_paper() -> None:
    """δ_t + γ_t·λ_t·A_{t+1}, with an end in the middle whose value does not count and whose successor is not seen."""
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, 7, 2, generator=generator)
    next_value = torch.cat([value[1:], torch.randn(1, 2, generator=generator)])
    next_value[3, 0] = next_value[5, 1] = 9.0
    discount, lambda_ = torch.full((7, 2), 0.9), torch.full((7, 2), 0.8)
    discount[3, 0] = lambda_[3, 0] = lambda_[5, 1] = 0.0  # a termination, and a truncation
    expected = torch.zeros(7, 2)
    for env in range(2):
        following = 0.0
        for t in reversed(range(7)):
            delta = reward[t, env] + discount[t, env] * next_value[t, env] - value[t, env]
            following = expected[t, env] = delta + discount[t, env] * lambda_[t, env] * following
    advantage, target = gae(reward, discount, value, next_value, lambda_)
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(target, expected + value)


def test_normalize() -> None:
    """Mean 0 and deviation 1; a single number is left alone."""
    result = normalize(torch.tensor([1.0, 2.0, 6.0]))
    assert result.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert result.std().item() == pytest.approx(1.0, rel=1e-5)
    assert normalize(torch.tensor([3.0])).item() == 3.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the trust region
        (1.5, 2.0, -2.4, 0.0),  # beyond it, where going on would pay: held
        (1.5, -2.0, 3.0, 3.0),  # beyond it, and worse than before: the way back is open
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, slope: float) -> None:
    """-min(ratio·A, clip(ratio)·A) and its derivative by log π."""
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped_surrogate(log_ratio, torch.tensor([advantage]), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-5)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (1.0, None, 4.0, -4.0),
        (1.0, 0.3, 7.29, 0.0),  # the value may be taken only from 0 to 0.3: the error there is larger, and constant
        (0.2, 0.3, 7.84, -5.6),
        (4.0, 0.3, 7.29, 0.0),
    ],
)
def test_value_loss(value: float, clip: float | None, loss: float, slope: float) -> None:
    """(v - 3)² where the old value was 0."""
    prediction = torch.tensor([value], requires_grad=True)
    result = value_loss(prediction, torch.tensor([3.0]), torch.tensor([0.0]), clip)
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-5)
    assert prediction.grad is not None
    assert prediction.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_kl_estimate() -> None:
    """Over many actions of the old policy its mean is KL(π_old ‖ π)."""
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (old * (old / new).log()).sum()
    actions = torch.multinomial(old, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    assert kl_estimate((new / old).log()[actions]).item() == pytest.approx(exact.item(), rel=0.02)

"""Running scales."""

from __future__ import annotations

import math

import pytest
import torch

from rl_lab.components.critics.dreamer import ReturnNormalizer
from rl_lab.nn.normalizers import RunningMeanStd


def test_percentiles_by_hand() -> None:
    """0..100 has the 5th percentile 5 and the 95th 95; one update moves 1 % of the way from 0."""
    normalizer = ReturnNormalizer()
    scale = normalizer(torch.randperm(101).float().view(101, 1))
    assert normalizer.low.item() == pytest.approx(0.05)
    assert normalizer.high.item() == pytest.approx(0.95)
    assert scale.item() == 1.0  # 0.9 is below the limit
    for _ in range(1000):
        normalizer.update(torch.arange(101.0))
    assert normalizer.scale().item() == pytest.approx(90.0, rel=1e-3)


def test_percentiles_interpolate_like_torch_quantile() -> None:
    values = torch.randn(7, 11) * 50
    normalizer = ReturnNormalizer(rate=1.0)
    normalizer.update(values)
    expected = torch.quantile(values, torch.tensor([0.05, 0.95]))
    torch.testing.assert_close(torch.stack([normalizer.low, normalizer.high]), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_returns_that_are_not_finite_leave_no_trace(bad: float) -> None:
    normalizer = ReturnNormalizer()
    normalizer.update(torch.arange(101.0))
    before = normalizer.high.item(), normalizer.low.item()
    normalizer.update(torch.tensor([1.0, bad, 2.0]))
    assert (normalizer.high.item(), normalizer.low.item()) == before


def test_state_is_saved() -> None:
    first, second = ReturnNormalizer(), ReturnNormalizer()
    first.update(torch.randn(100) * 100)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.high, second.high)


def test_running_mean_and_variance_equal_those_of_all_data() -> None:
    """Batches of different sizes merge exactly."""
    data = torch.randn(300, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + 5
    running = RunningMeanStd((4,))
    for batch in data.split([1, 9, 90, 200]):
        running.update(batch)
    torch.testing.assert_close(running.mean, data.mean(0))
    torch.testing.assert_close(running.variance, data.var(0, unbiased=False), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(running(data).std(0, unbiased=False), torch.ones(4), rtol=1e-3, atol=1e-3)

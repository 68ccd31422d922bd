"""MuZero's transform and its categorical coding."""

from __future__ import annotations

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.nn.support import Support, squash, unsquash


def test_the_transform_has_the_published_values_and_an_inverse() -> None:
    values = squash(torch.tensor([0.0, 1.0, 100.0, -1.0], dtype=torch.float64))
    assert values.tolist() == pytest.approx([0.0, 0.415214, 9.149876, -0.415214], abs=1e-6)
    x = torch.linspace(-5e4, 5e4, 1001, dtype=torch.float64)
    torch.testing.assert_close(unsquash(squash(x)), x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(unsquash(squash(x.float())), x.float(), rtol=1e-3, atol=1e-3)


def test_a_target_is_spread_over_its_two_neighbours() -> None:
    """The cross-entropy of logits that put everything on one bin shows how much mass the target has there."""
    support = Support(bins=21, limit=10.0)
    places = {2.0: {12: 1.0}, -0.25: {9: 0.25, 10: 0.75}, 10.0: {20: 1.0}, -10.0: {0: 1.0}, 99.0: {20: 1.0}}
    for squashed, expected in places.items():
        target = unsquash(torch.tensor(squashed, dtype=torch.float64))
        logits = torch.zeros(21, 21, dtype=torch.float64).fill_diagonal_(1.0)
        floor = torch.log_softmax(logits[0], -1)[1]
        mass = -support.loss(logits, target.expand(21)) - floor
        for bin_ in range(21):
            assert mass[bin_] == pytest.approx(expected.get(bin_, 0.0), abs=1e-6)


def test_uniform_logits_mean_zero_and_a_certain_bin_its_value() -> None:
    support = Support(bins=41, limit=20.0)
    assert float(support.mean(torch.zeros(41))) == pytest.approx(0.0, abs=1e-4)
    certain = torch.full((41,), -50.0).index_fill(0, torch.tensor([35]), 50.0)
    torch.testing.assert_close(support.mean(certain), unsquash(torch.tensor(15.0)))
    assert support.outside(torch.tensor([100.0, 1000.0])).tolist() == [False, True]


def test_bad_bins_are_refused() -> None:
    with pytest.raises(ConfigError, match="odd"):
        Support(bins=20, limit=10.0)

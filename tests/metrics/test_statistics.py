from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rl_lab.metrics.statistics import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([1.0, 2.0, 6.0], 3.0),  # nothing to leave out
        ([0.0, 1.0, 2.0, 100.0], 1.5),
        ([100.0, 1.0, 2.0, 3.0, -50.0], 2.0),
        (list(range(1, 9)), 4.5),
        ([[0.0, 1.0], [2.0, 100.0]], 1.5),  # all runs of all tasks together
    ],
)
def test_interquartile_mean_by_hand(values, expected):
    """floor(n/4) values are left out at each end, the rest is averaged."""
    assert interquartile_mean(values) == expected


def test_interval_is_reproducible_and_contains_the_mean():
    """The seed is fixed; the interval lies within the data and around the statistic."""
    scores = [480.0, 495.0, 500.0, 470.0, 488.0]
    low, high = bootstrap_interval(scores)
    assert (low, high) == bootstrap_interval(scores)
    assert min(scores) <= low < interquartile_mean(scores) < high <= max(scores)


def test_bootstrap_of_the_mean_matches_theory():
    """For the plain mean the interval is close to ± 1.96 standard errors."""
    scores = np.random.default_rng(1).normal(size=200)
    low, high = bootstrap_interval(scores, statistic=lambda values: values.mean(-1))
    error = scores.std() / np.sqrt(200)
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.15 * error)


def test_bootstrap_is_stratified():
    """Runs are drawn within a task: tasks of different scale add no variance between them."""
    scores = np.array([[0.0, 1000.0]] * 4)
    assert bootstrap_interval(scores, statistic=lambda values: values.mean(-1)) == (500.0, 500.0)


def test_no_scores_is_an_error():
    """There is no mean of nothing."""
    with pytest.raises(ValueError, match="at least one"):
        interquartile_mean([])
    with pytest.raises(ValueError, match="at least one run"):
        bootstrap_interval([])


def test_reading_side_does_not_import_torch():
    """`rl-lab compare` and the results tables start fast."""
    code = "import sys, rl_lab.metrics.statistics, rl_lab.metrics.comparison; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

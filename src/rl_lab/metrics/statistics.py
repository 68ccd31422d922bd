"""Summaries of several runs: the interquartile mean and its bootstrap interval. NumPy only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

Statistic = Callable[[np.ndarray], np.ndarray]  # [..., values] -> [...]


def interquartile_mean(values: ArrayLike) -> float:
    """The mean of the middle half: floor(n/4) values are left out at each end (the definition of rliable).

    Of 5 values the smallest and the largest are left out. Of 3 or fewer, none.
    """
    flat = np.asarray(values, np.float64).reshape(-1)
    if flat.size == 0:
        raise ValueError("The interquartile mean needs at least one value; there is none.")
    return float(_trimmed_mean(flat))


def bootstrap_interval(
    scores: ArrayLike,
    *,
    statistic: Statistic | None = None,
    confidence: float = 0.95,
    samples: int = 20_000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile interval of a statistic (default: interquartile mean) by a stratified bootstrap.

    `scores` is [runs] of one task or [runs, tasks]. Runs are drawn with replacement within each task, so every task
    keeps its weight. The seed is fixed: the same scores give the same interval. One run gives no width.
    """
    table = np.asarray(scores, np.float64)
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"Scores must be [runs] or [runs, tasks] with at least one run; got shape {table.shape}.")
    runs, tasks = table.shape
    generator = np.random.default_rng(seed)
    chosen = generator.integers(0, runs, (samples, runs, tasks))
    resampled = table[chosen, np.arange(tasks)].reshape(samples, runs * tasks)
    values = (statistic or _trimmed_mean)(resampled)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)


def _trimmed_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis without the quarter at each end."""
    count = values.shape[-1]
    cut = count // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : count - cut].mean(-1))

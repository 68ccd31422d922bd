"""Two-hot regression on the CPU as passes over float32 arrays: see `rl_lab.nn.host_kernels`, and `TwoHot` for the plain
form. Logits are [rows, bins]; the losses of several targets are [targets, rows]. `first` and `end` say which rows a
call is about."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from rl_lab.nn.host_kernels import ZERO, exp, inline, kernel, largest


@inline
def _exponentials(logits: Any, weights: Any) -> Any:
    """exp(logits - largest) into `weights`; gives the largest."""
    top = largest(logits)
    for j in range(logits.shape[0]):
        weights[j] = exp(logits[j] - top)
    return top


@kernel
def mean(logits: Any, bins: Any, means: Any) -> None:
    """Each bin is paired with its mirror image, so that uniform logits give exactly 0."""
    rows, size = logits.shape
    center, weights, left = size // 2, np.empty(size, np.float32), np.empty(size // 2, np.float32)
    right, upper = weights[center + 1 :], bins[center + 1 :]
    for i in range(rows):
        _exponentials(logits[i], weights)
        for j in range(center):
            left[j] = weights[np.uintp(center - 1 - j)]  # without a sign, which would slow the loop down
        total, surplus = weights[center], ZERO
        for j in range(center):
            total += left[j] + right[j]
            surplus += (right[j] - left[j]) * upper[j]
        means[i] = surplus / total


@kernel
def losses(
    logits: Any,
    bins: Any,
    targets: Any,
    losses: Any,
    lower: Any,
    upper_mass: Any,
    log_totals: Any,
    first: Any,
    end: Any,
) -> None:
    """Cross-entropies, and what their derivative needs: the bin below each target and how much of it belongs to the one
    above, and the logarithms of the sums [rows]."""
    size = logits.shape[1]
    weights = np.empty(size, np.float32)
    for i in range(first, end):
        top, total = _exponentials(logits[i], weights), ZERO
        for j in range(size):
            total += weights[j]
        log_totals[i] = top + np.float32(log(total))
        for number in range(targets.shape[0]):
            target = targets[number, i]
            target = bins[0] if target < bins[0] else target
            target = bins[size - 1] if target > bins[size - 1] else target
            low, high = 0, size - 2
            while low < high:
                middle = (low + high) // 2
                if bins[middle + 1] <= target:
                    low = middle + 1
                else:
                    high = middle
            mass = (target - bins[low]) / (bins[low + 1] - bins[low])
            chosen = logits[i, low] + mass * (logits[i, low + 1] - logits[i, low])
            lower[number, i], upper_mass[number, i] = low, mass
            losses[number, i] = log_totals[i] - chosen


@kernel
def losses_backward(
    grad: Any, logits: Any, lower: Any, upper_mass: Any, log_totals: Any, by_logits: Any, first: Any, end: Any
) -> None:
    """softmax - two-hot, each target as much as its loss counts."""
    for i in range(first, end):
        total = ZERO
        for number in range(grad.shape[0]):
            total += grad[number, i]
        for j in range(logits.shape[1]):
            by_logits[i, j] = exp(logits[i, j] - log_totals[i]) * total
        for number in range(grad.shape[0]):
            low, upper = lower[number, i], grad[number, i] * upper_mass[number, i]
            by_logits[i, low] -= grad[number, i] - upper
            by_logits[i, low + 1] -= upper

"""Objectives of policy gradients, with their derivatives in closed form; on arrays or tensors (`rl_lab.nn.arrays`)."""

from __future__ import annotations

from rl_lab.nn.arrays import Array, flags, library, mean


def clipped_surrogate(log_ratio: Array, advantage: Array, clip: float) -> tuple[Array, Array, Array]:
    """PPO's loss, -mean min(A·ratio, A·clip(ratio)) with ratio = π/π_old, its derivative by log π, and the ratios.

    The derivative is -A·ratio where the ratio may still move, and 0 where leaving the trust region would pay.
    """
    xp = library(log_ratio)
    ratio = xp.exp(log_ratio)
    free, bounded = advantage * ratio, advantage * ratio.clip(1.0 - clip, 1.0 + clip)
    slope = free * flags(free <= bounded) * (-1.0 / len(ratio.reshape(-1)))
    return -mean(xp.minimum(free, bounded)), slope, ratio


def squared_error(value: Array, target: Array, old: Array, clip: float | None = None) -> tuple[Array, Array]:
    """The mean squared error and its derivative; with `clip`, of the worse of the value and of one that moved from the
    old value only so far."""
    error, share = value - target, 2.0 / len(value.reshape(-1))
    if clip is None:
        return mean(error * error), error * share
    move = value - old
    near = old + move.clip(-clip, clip) - target
    further = error * error >= near * near
    worse = library(value).where(further, error, near)
    # A value that was held back does not depend on the parameters.
    return mean(worse * worse), worse * flags(further | (abs(move) <= clip)) * share

"""Advantages and losses of PPO (Schulman et al., 2016 and 2017), as pure functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab import ranks
from rl_lab.losses.returns import recursive_returns


class Advantages(NamedTuple):
    """Advantages, and the value targets that go with them (advantage + value)."""

    advantage: Float[Tensor, "time env"]
    target: Float[Tensor, "time env"]


def gae(
    reward: Float[Tensor, "time env"],
    discount: Float[Tensor, "time env"],
    value: Float[Tensor, "time env"],
    next_value: Float[Tensor, "time env"],
    lambda_: Float[Tensor, "time env"],
) -> Advantages:
    """Generalised advantage estimation: δ_t = r_t + γ_t·v'_t - v_t and A_t = δ_t + γ_t·λ_t·A_{t+1}.

    r_t is the reward for decision t, v'_t the value of what followed it: v_{t+1} within an episode. γ_t is 0 where that
    was terminal, λ_t where it ended an episode, so that no advantage looks into the next one.
    """
    target = recursive_returns(reward, discount, next_value, lambda_, next_value[-1], dim=0)
    return Advantages(target - value, target)


def normalize(advantage: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Minus the mean, over the standard deviation, both of the whole batch; a single advantage stays as it is."""
    if advantage.numel() < 2:
        return advantage
    deviation, mean = torch.std_mean(ranks.gathered(advantage))
    return (advantage - mean) / (deviation + 1e-8)


def clipped_surrogate(
    log_ratio: Float[Tensor, "*batch"], advantage: Float[Tensor, "*batch"], clip: float
) -> Float[Tensor, ""]:
    """-mean min(ratio·A, clip(ratio, 1 - ε, 1 + ε)·A) with ratio = π/π_old: leaving the trust region gains nothing."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage).mean()


def value_loss(
    value: Float[Tensor, "*batch"],
    target: Float[Tensor, "*batch"],
    old_value: Float[Tensor, "*batch"],
    clip: float | None = None,
) -> Float[Tensor, ""]:
    """Mean squared error. With `clip`, the larger of it and of the error of a value that moved at most `clip` away from
    the old one."""
    error = (value - target).square()
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - target).square())
    return error.mean()


def kl_estimate(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, ""]:
    """KL(π_old ‖ π) from actions of π_old: mean (ratio - 1 - log ratio), unbiased and never negative."""
    return (log_ratio.expm1() - log_ratio).mean()

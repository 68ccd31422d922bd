"""Returns, and the losses of agents that learn from imagined ones, as pure functions.

Record t holds the reward received on arriving at it, so the return of state t begins with the reward of record t+1.
Inputs have T records along the time axis `dim` (1 for [batch, time], 0 for time-major); results have T - 1, for the
states that have a successor. `discount` is the one on arriving at a record: γ·(1 - is_terminal), or a learned
continue prediction that already contains γ. Truncation (`is_last` without `is_terminal`) bootstraps from the value of
the last record. A record with `is_last` has no successor of its own episode: its result is meaningless, and the caller
masks it with ~is_last.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def recursive_returns(
    reward: Tensor, discount: Tensor, next_value: Tensor, lambda_: Tensor | float, last: Tensor, *, dim: int = 1
) -> Tensor:
    """R_t = reward_t + discount_t·((1 - λ_t)·next_value_t + λ_t·R_{t+1}), where R after the end is `last`.

    The general form behind the others, without a shift in time: DreamerV3 passes `reward[1:], discount[1:], value[1:]`,
    Dreamer V1 and V2 pass `reward[:-1], discount[:-1], value[1:]`, each with `last=value[-1]`. Tensors of one shape,
    `last` without the axis `dim`.
    """
    slope = discount * lambda_
    base = torch.addcmul(reward, discount - slope, next_value)
    returns, current = [], last
    for base_t, slope_t in zip(reversed(base.unbind(dim)), reversed(slope.unbind(dim)), strict=True):
        current = torch.addcmul(base_t, slope_t, current)
        returns.append(current)
    return torch.stack(returns[::-1], dim)


def lambda_returns(
    reward: Float[Tensor, "*records"],
    discount: Float[Tensor, "*records"],
    value: Float[Tensor, "*records"],
    lambda_: Float[Tensor, "*records"] | float = 0.95,
    *,
    dim: int = 1,
) -> Float[Tensor, "*states"]:
    """TD(λ): R_t = r_{t+1} + γ_{t+1}·((1 - λ_{t+1})·v_{t+1} + λ_{t+1}·R_{t+1}); R of the last record is its value.

    As a tensor, λ·(1 - is_last) cuts the return at truncations, where it then bootstraps from `value`.
    """
    reward, discount, next_value = (from_second(x, dim) for x in (reward, discount, value))
    lambda_ = from_second(lambda_, dim) if isinstance(lambda_, Tensor) else lambda_
    return recursive_returns(reward, discount, next_value, lambda_, value.select(dim, -1), dim=dim)


def first_n_step_return(
    reward: Float[Tensor, "batch records"],
    discount: Float[Tensor, "batch records"],
    is_last: Bool[Tensor, "batch records"],
    value: Float[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """The n-step return of the first record alone, from n + 1 records.

    `value` [batch] is that of the record where it ends: the n-th after the first, or the episode's last where that
    comes before.
    """
    last = reward.shape[1] - 1
    returns = value
    for step in range(last, 0, -1):
        if step < last:
            returns = torch.where(is_last[:, step], value, returns)
        returns = torch.addcmul(reward[:, step], discount[:, step], returns)
    return returns


def masked_discount(
    is_terminal: Bool[Tensor, "*records"], discount: float, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*records"]:
    """γ·(1 - is_terminal)."""
    return (1.0 - is_terminal.to(dtype)) * discount


def from_second(x: Tensor, dim: int) -> Tensor:
    """All but the first along an axis."""
    return x.narrow(dim, 1, x.shape[dim] - 1)


# Imagined rollouts ---------------------------------------------------------------------------------------------------
# They are time-major: state t = 0 … H, and the discount d_t on arriving at state t.


def with_first(
    discount: Float[Tensor, "states starts"], first: Float[Tensor, " starts"]
) -> Float[Tensor, "states starts"]:
    """The discounts with another d_0: that of the state which a dream starts in, known from the data."""
    return torch.cat([first[None].to(discount.dtype), discount[1:]])


def cumulative_discounts(discount: Float[Tensor, "states batch"]) -> Float[Tensor, "states batch"]:
    """d_0·…·d_t: the probability, discounted, that the dream reaches state t and goes on. A constant."""
    return discount.detach().cumprod(0)


def cumulative_discounts_before(discount: Float[Tensor, "states batch"]) -> Float[Tensor, "states batch"]:
    """d_0·…·d_{t-1}, and 1 for the first state: how much the return of state t itself counts. A constant."""
    return torch.cat([torch.ones_like(discount[:1]), discount[:-1]]).detach().cumprod(0)


def reinforce_objective(
    log_prob: Float[Tensor, "*states"], advantage: Float[Tensor, "*states"]
) -> Float[Tensor, "*states"]:
    """ln π(a|s)·A: its gradient is that of the expected return by the policy's parameters. A is a constant."""
    return log_prob * advantage.detach()


def actor_loss(
    objective: Float[Tensor, "*states"],
    weight: Float[Tensor, "*states"],
    *,
    entropy: Float[Tensor, "*states"] | None = None,
    entropy_scale: float = 0.0,
) -> Float[Tensor, ""]:
    """-mean w·(objective + η·H[π])."""
    if entropy is not None and entropy_scale:
        objective = objective + entropy_scale * entropy
    return -(weight * objective).mean()


def weighted_mean(loss: Float[Tensor, "*states"], weight: Float[Tensor, "*states"]) -> Float[Tensor, ""]:
    """mean w·loss: the critic's loss over the states of imagined rollouts."""
    return (weight * loss).mean()


# The KL of posterior and prior ----------------------------------------------------------------------------------------


def kl_beyond_free_nats(kl: Float[Tensor, "*steps"], free_nats: float) -> Float[Tensor, "*steps"]:
    """PlaNet: max(KL - free, 0) of each step. Free nats are taken off the loss."""
    return (kl - free_nats).clamp_min(0.0)


def mean_kl_with_free_nats(kl: Float[Tensor, "*steps"], free_nats: float) -> Float[Tensor, ""]:
    """Dreamer v1 and v2: max(mean KL, free). Below it, over the whole batch, nothing is learned from the KL."""
    return kl.mean().clamp_min(free_nats)


def step_kl_with_free_nats(kl: Float[Tensor, "*steps"], free_nats: float) -> Float[Tensor, ""]:
    """DreamerV3: mean max(KL, free), the limit being that of each step."""
    return kl.clamp_min(free_nats).mean()

"""Returns, advantages and value targets, as pure functions.

Record t holds the reward received on arriving at it, so the return of state t begins with the reward of record t+1.
Inputs have T records along the time axis `dim` (1 for [batch, time], 0 for time-major); results have T - 1, for the
states that have a successor. `live` is the discount on arriving at a record: discount·(1 - is_terminal), or a learned
continue prediction that already contains the discount. Truncation (`is_last` without `is_terminal`) bootstraps from the
value of the last record. A record with `is_last` has no successor of its own episode: its result is meaningless, and
the caller masks it with ~is_last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.nn.arrays import Array, library
from rl_lab.nn.fusion import has_numba, has_triton
from rl_lab.nn.host_kernels import recurrence
from rl_lab.nn.math import in_full_on_host


class Advantages(NamedTuple):
    """Advantages, and the value targets that go with them (advantage + value)."""

    advantage: Tensor
    target: Tensor


def recursive_returns(
    reward: Array, live: Array, next_value: Array, mix: Array | float, last: Array, *, dim: int = 1
) -> Array:
    """R_t = reward_t + live_t·((1 - mix_t)·next_value_t + mix_t·R_{t+1}), where R after the end is `last`.

    The general form behind the others, without a shift in time: DreamerV3 passes `reward[1:], cont[1:], value[1:]`,
    Dreamer V1 and V2 pass `reward[:-1], discount[:-1], value[1:]`, each with `last=value[-1]`. Arrays or tensors of one
    shape, `last` without the axis `dim`.
    """
    base, slope = reward + live * (1.0 - mix) * next_value, live * mix
    if isinstance(base, Tensor) and in_full_on_host(base) and not any(x.requires_grad for x in (base, slope, last)):
        return torch.from_numpy(_recurrence(base.numpy(), slope.numpy(), last.numpy(), dim))
    if isinstance(base, np.ndarray):
        return _recurrence(base, slope, last, dim)
    if not torch.compiler.is_compiling() and has_triton(base):
        from rl_lab.nn.recurrence_kernel import Recurrence

        first, steps = base.movedim(dim, 0), base.shape[dim]
        slopes = slope.movedim(dim, 0).reshape(steps, -1)
        return Recurrence.apply(first.reshape(steps, -1), slopes, last.reshape(-1)).view(first.shape).movedim(0, dim)
    bases, slopes, returns, current = base.unbind(dim), slope.unbind(dim), [], last
    for base_t, slope_t in zip(reversed(bases), reversed(slopes), strict=True):
        current = torch.addcmul(base_t, slope_t, current)
        returns.append(current)
    return torch.stack(returns[::-1], dim)


def _recurrence(base: np.ndarray, slope: np.ndarray, last: np.ndarray, dim: int) -> np.ndarray:
    """x_t = base_t + slope_t·x_{t+1}, where x after the end is `last`. On the CPU torch's calls are the dearer ones."""
    bases, slopes = np.moveaxis(base, dim, 0), np.moveaxis(slope, dim, 0)
    if base.dtype == np.float32 and has_numba():
        result = np.empty(bases.shape, np.float32)
        flat = [np.ascontiguousarray(part).reshape(len(bases), -1) for part in (bases, slopes)]
        recurrence(*flat, np.ascontiguousarray(last).reshape(-1), result.reshape(len(bases), -1))
        return np.moveaxis(result, 0, dim)
    results, current = [], last
    for base_t, slope_t in zip(bases[::-1], slopes[::-1], strict=True):
        current = base_t + slope_t * current
        results.append(current)
    return np.stack(results[::-1], dim)


def lambda_returns(
    reward: Float[Tensor, "*records"],
    live: Float[Tensor, "*records"],
    value: Float[Tensor, "*records"],
    mix: Float[Tensor, "*records"] | float = 0.95,
    *,
    dim: int = 1,
) -> Float[Tensor, "*states"]:
    """TD(λ): R_t = r_{t+1} + live_{t+1}·((1 - λ_{t+1})·v_{t+1} + λ_{t+1}·R_{t+1}); R of the last record is its value.

    `mix` is λ. As a tensor, λ·(1 - is_last) cuts the return at truncations, where it then bootstraps from `value`.
    """
    later = _from_second(mix, dim) if isinstance(mix, Tensor) else mix
    final = value.select(dim, -1)
    return recursive_returns(
        _from_second(reward, dim), _from_second(live, dim), _from_second(value, dim), later, final, dim=dim
    )


def discounted_returns(
    reward: Float[Tensor, "*records"],
    live: Float[Tensor, "*records"],
    is_last: Bool[Tensor, "*records"],
    value: Float[Tensor, "*records"],
    *,
    dim: int = 1,
) -> Float[Tensor, "*states"]:
    """Discounted rewards to the episode's end; what lies beyond a truncation or the last record is `value`."""
    return lambda_returns(reward, live, value, 1.0 - is_last.to(reward.dtype), dim=dim)


def n_step_returns(
    reward: Float[Tensor, "*records"],
    live: Float[Tensor, "*records"],
    is_last: Bool[Tensor, "*records"],
    value: Float[Tensor, "*records"],
    n: int,
    *,
    dim: int = 1,
) -> Float[Tensor, "*states"]:
    """n rewards and then the value; fewer rewards where the episode or the sequence ends before that."""
    reward, live, values = (_from_second(x, dim) for x in (reward, live, value))
    ends = _from_second(is_last, dim)
    length = reward.shape[dim]
    following = values  # the 0-step return of each successor
    for _ in range(n):
        returns = torch.addcmul(reward, live, following)
        shifted = torch.cat([returns.narrow(dim, 1, length - 1), values.narrow(dim, length - 1, 1)], dim)
        following = torch.where(ends, values, shifted)
    return returns


def first_n_step_return(reward: Array, live: Array, is_last: Array, value: Array) -> Array:
    """The n-step return of the first record alone, [batch], from n + 1 records [batch, records] of arrays or tensors.

    `value` [batch] is that of the record where it ends: the n-th after the first, or the episode's last where that
    comes before.
    """
    where, last = library(value).where, reward.shape[1] - 1
    returns = value
    for step in range(last, 0, -1):
        if step < last:
            returns = where(is_last[:, step], value, returns)
        returns = reward[:, step] + live[:, step] * returns
    return returns


def gae(
    reward: Float[Tensor, "*records"],
    live: Float[Tensor, "*records"],
    is_last: Bool[Tensor, "*records"],
    value: Float[Tensor, "*records"],
    mix: float = 0.95,
    *,
    dim: int = 1,
) -> Advantages:
    """Generalised advantage estimation: A_t = δ_t + live_{t+1}·λ·A_{t+1}, which is the λ-return minus the value."""
    target = lambda_returns(reward, live, value, mix * (1.0 - is_last.to(reward.dtype)), dim=dim)
    return Advantages(target - value.narrow(dim, 0, value.shape[dim] - 1), target)


def live_discount(
    is_terminal: Bool[Tensor, "*records"], discount: float, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*records"]:
    """discount·(1 - is_terminal)."""
    return (1.0 - is_terminal.to(dtype)) * discount


def _from_second(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 1, x.shape[dim] - 1)

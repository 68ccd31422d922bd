"""Targets of a model that is unrolled from one observation along recorded actions, as in MuZero.

Windows [batch, time] begin at the record that is unrolled from and may run past the end of its episode. `discount` is
negative where two players alternate: every value is that of the player to move.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class EpisodeMasks(NamedTuple):
    """Which of the first records of a window belong to the episode that it begins in, [batch, states], as numbers."""

    inside: Float[Tensor, "batch states"]  # 1 up to the episode's last record
    decided: Float[Tensor, "batch states"]  # 1 where an action was taken: up to the record before the last
    absorbed: Float[Tensor, "batch states"]  # 1 from a terminal record on: value 0, and reward 0 after it

    @property
    def known(self) -> Float[Tensor, "batch states"]:
        """1 where the value is known: everywhere but from a truncation on."""
        return torch.maximum(self.decided, self.absorbed)


def episode_masks(
    is_last: Bool[Tensor, "batch time"], is_terminal: Bool[Tensor, "batch time"], states: int
) -> EpisodeMasks:
    """Masks of the first `states` records."""
    last = is_last[:, :states].float()
    ended = last.cumsum(1).clamp(max=1.0)  # from the last record on
    inside = 1.0 - torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1)
    absorbed = (is_terminal[:, :states].float() * inside).cumsum(1).clamp(max=1.0)
    return EpisodeMasks(inside, 1.0 - ended, absorbed)


def bootstrap_positions(
    is_last: Bool[Tensor, "batch time"], steps: Int[Tensor, " batch"] | int, states: int
) -> Int[Tensor, "batch states"]:
    """The record that the return of each of the first `states` records ends with: `steps` later, or the episode's last
    or the window's last where that comes before."""
    length = is_last.shape[1]
    numbers = torch.arange(length, device=is_last.device)
    ends = torch.where(is_last, numbers, length - 1).flip(1).cummin(1).values.flip(1)[:, :states]
    wanted = numbers[:states] + (steps[:, None] if isinstance(steps, Tensor) else steps)
    return torch.minimum(ends, wanted)


def unrolled_n_step_returns(
    reward: Float[Tensor, "batch time"],
    position: Int[Tensor, "batch states"],  # from `bootstrap_positions`
    value: Float[Tensor, "batch states"],  # of these records, 0 where they are terminal
    *,
    discount: float,
    steps: int,
) -> Float[Tensor, "batch states"]:
    """z_i = r_{i+1} + γ r_{i+2} + … + γ^(p-i) V_p, where p is the position of i."""
    states = position.shape[1]
    padded = torch.nn.functional.pad(reward, (0, max(0, states + steps - reward.shape[1])))
    rewards = padded.unfold(1, steps, 1)[:, 1 : states + 1]  # [batch, states, steps]: those that follow each record
    count = position - torch.arange(states, device=position.device)
    numbers = torch.arange(steps, device=position.device)
    powers = discount ** torch.arange(steps + 1, device=position.device).to(reward.dtype)
    collected = (rewards * powers[:-1] * (numbers < count[..., None])).sum(-1)
    return collected + powers[count] * value


def absorb(target: Float[Tensor, "batch states"], masks: EpisodeMasks) -> Float[Tensor, "batch states"]:
    """The value targets with 0 from a terminal record on."""
    return target * (1.0 - masks.absorbed)

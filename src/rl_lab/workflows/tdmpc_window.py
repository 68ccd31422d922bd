"""The windows of records that TD-MPC and TD-MPC2 learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Window(NamedTuple):
    """A stretch of `horizon` transitions, time first. Entry k of `action`, `reward` and `terminal` leads from k to k+1.

    A window may run past the end of an episode; `valid` and `alive` leave out what lies beyond it.
    """

    observation: dict[str, Tensor]  # [horizon + 1, batch, ...]
    action: Float[Tensor, "horizon batch action"]  # encoded
    reward: Float[Tensor, "horizon batch"]
    terminal: Float[Tensor, "horizon batch"]  # 1 where the transition ends the episode for good; never a truncation
    valid: Float[Tensor, "horizon batch"]  # 1 where the transition belongs to the episode that the window begins in
    alive: Float[Tensor, "states batch"]  # [horizon + 1]: 1 where the state does, and an action can be taken in it
    weight: Float[Tensor, " batch"] | None  # of prioritised replay

    @property
    def first(self) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.observation.items()}

    @property
    def following(self) -> dict[str, Tensor]:
        return {key: value[1:] for key, value in self.observation.items()}


def make_window(
    observation: Mapping[str, Tensor], action: Float[Tensor, "batch states action"], rest: Mapping[str, Tensor]
) -> Window:
    """A batch with time first. Observations are [batch, states, ...], actions encoded; `rest` has the other fields."""
    valid = rest["is_last"].logical_not().float().t()[:-1].cumprod(0)
    living = rest["is_terminal"].logical_not().float().t()
    return Window(
        observation={key: value.transpose(0, 1) for key, value in observation.items()},
        action=action[:, :-1].transpose(0, 1),
        reward=rest["reward"][:, 1:].t(),
        terminal=1.0 - living[1:],
        valid=valid,
        alive=torch.cat([living[:1], living[1:] * valid]),
        weight=rest.get("weight"),
    )


class RolledOut(NamedTuple):
    """The model's predictions of a window from its first observation and its actions."""

    latents: Float[Tensor, "states batch latent"]  # z_0 … z_H
    reward: Float[Tensor, "horizon batch bins"]  # raw outputs

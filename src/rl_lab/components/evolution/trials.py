"""The trials of a population: which member plays which episode, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.environments.base import VectorEnv
from rl_lab.records import Observation
from rl_lab.simulation.simulator import ModelState, Simulator

Act = Callable[[Observation], np.ndarray]  # [row, ...] per key → actions [row, *action]


class Trials:
    """Returns of one generation, [member, episode], filled in waves: so a run can be saved between two of them."""

    def __init__(self) -> None:
        self.returns = np.zeros((0, 0))
        self.lengths = np.zeros((0, 0), np.int64)
        self.played = 0  # (member, episode) pairs, episode by episode

    def begin(self, population: int, episodes: int) -> None:
        """Get ready for a generation, unless one is under way."""
        if self.played == 0:
            self.returns = np.zeros((population, episodes))
            self.lengths = np.zeros((population, episodes), np.int64)

    def next(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Members and episodes of the next wave, at most that many rows. All members play an episode before the next
        one comes."""
        members = len(self.returns)
        number = np.arange(self.played, min(self.played + most, self.returns.size))
        return number % members, number // members

    def record(self, members: np.ndarray, episodes: np.ndarray, returns: np.ndarray, lengths: np.ndarray) -> None:
        self.returns[members, episodes], self.lengths[members, episodes] = returns, lengths
        self.played += len(members)

    @property
    def complete(self) -> bool:
        return self.played == self.returns.size > 0

    def finish(self) -> np.ndarray:
        """The fitness of each member, and room for the next generation."""
        self.played = 0
        return self.returns.mean(1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "returns": torch.from_numpy(self.returns.copy()),
            "lengths": torch.from_numpy(self.lengths.copy()),
            "played": self.played,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns, self.lengths = state["returns"].numpy().copy(), state["lengths"].numpy().copy()
        self.played = state["played"]


class Played(NamedTuple):
    """The results of a wave of episodes."""

    returns: np.ndarray  # [row]
    lengths: np.ndarray  # [row] decisions
    env_steps: int  # in the game; a dream takes none


def play_episodes(envs: VectorEnv, seeds: list[int], act: Act, *, patience: int | None = None) -> Played:
    """One episode for each seed, all at once: row i plays seed i. `act` chooses for all rows together.

    With `patience` an episode is cut after that many decisions without a reward above 0: not much would come of it.
    """
    rows = len(seeds)
    current = envs.reset([*seeds, *[None] * (envs.num_envs - rows)])
    returns, lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, np.int64)
    idle = np.zeros(envs.num_envs, np.int64)
    running = np.arange(envs.num_envs) < rows
    while running.any():
        current = envs.step(act(current.observation))
        returns += current.reward
        lengths += running
        idle = np.where(current.reward > 0, 0, idle + 1)
        if current.ended is not None:
            returns[current.ended.indices] += current.ended.reward
            running[current.ended.indices] = False
        if patience is not None and (cut := running & (idle >= patience)).any():
            envs.stop(np.flatnonzero(cut))
            running &= ~cut
    return Played(returns[:rows], lengths[:rows], int(lengths[:rows].sum()))


@torch.no_grad()
def dream_episodes(
    simulator: Simulator,
    state: ModelState,
    policy: Callable[[ModelState], Float[Tensor, "batch action"]],
    *,
    horizon: int,
) -> Played:
    """Episodes inside a model, one for each row of `state`. One ends where the model thinks it more likely ends than
    goes on, or after `horizon` steps; its return is what it was paid until then, that step included."""
    total: Tensor | None = None
    length, alive = torch.zeros(()), torch.ones(())
    for _ in range(horizon):
        state, reward, continuation = simulator.step(state, policy(state))
        if total is None:
            total, length, alive = torch.zeros_like(reward), torch.zeros_like(reward), torch.ones_like(reward)
        total, length = total + alive * reward, length + alive
        alive = alive * (continuation > 0.5)
        if not alive.any():
            break
    assert total is not None
    return Played(total.double().cpu().numpy(), length.long().cpu().numpy(), 0)

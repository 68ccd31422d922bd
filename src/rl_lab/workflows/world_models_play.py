"""The two places where members of a population play: the game itself, and M's dream of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rl_lab.components.actions import ActionCodec
from rl_lab.components.actors.flat import FlatController
from rl_lab.components.dynamics.mdn_rnn import MDNRNN, MemoryState
from rl_lab.components.evolution.trials import Played, dream_episodes, play_episodes
from rl_lab.environments.base import VectorEnv, episode_seed
from rl_lab.errors import ConfigError
from rl_lab.records import Observation
from rl_lab.simulation.mdn_rnn import DreamState, MDNSimulator
from rl_lab.workflows.context import EnvsFactory
from rl_lab.workflows.world_models_codes import Codes

Control = Callable[[Observation, MemoryState, Tensor], tuple[Tensor, MemoryState]]  # → encoded action, memory


class Game:
    """Episodes in environments of its own, which are made when they are first needed."""

    def __init__(
        self, make_envs: EnvsFactory | None, *, num_envs: int, dynamics: MDNRNN, control: Control, codec: ActionCodec,
        seed: int, patience: int | None,
    ) -> None:  # fmt: skip
        self._make_envs, self.num_envs, self.dynamics, self.control = make_envs, num_envs, dynamics, control
        self.codec, self.seed, self.patience = codec, seed, patience
        self._envs: VectorEnv | None = None

    @property
    def envs(self) -> VectorEnv:
        if self._envs is None:
            assert self._make_envs is not None
            self._envs = self._make_envs(num_envs=self.num_envs)
        return self._envs

    @torch.no_grad()
    def play(self, vectors: Tensor, members: np.ndarray, episodes: np.ndarray, *, generation: int) -> Played:
        """Row i of the wave is an episode of controller `vectors[members[i]]`. The number of an episode decides how it
        begins: all members of a generation meet the same ones, so that luck does not rank them."""
        rows = np.zeros(self.envs.num_envs, np.int64)
        rows[: len(members)] = members
        chosen, memory = vectors[rows], self.dynamics.initial(len(rows))

        def act(observation: Observation) -> np.ndarray:
            nonlocal memory
            action, memory = self.control(observation, memory, chosen)
            return self.codec.decode(action).cpu().numpy()

        seeds = [episode_seed(self.seed, number, generation, "evolution") for number in episodes.tolist()]
        return play_episodes(self.envs, seeds, act, patience=self.patience)

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
            self._envs = None


class DreamedGame:
    """Episodes in M alone: from a first frame of the game on, with an empty memory, at most `horizon` steps."""

    def __init__(self, simulator: MDNSimulator, policy: FlatController, codes: Codes, *, horizon: int) -> None:
        self.simulator, self.policy, self.codes, self.horizon = simulator, policy, codes, horizon

    @torch.no_grad()
    def play(self, vectors: Tensor | None, members: np.ndarray, episodes: np.ndarray, *, temperature: float) -> Played:
        """Row i is an episode of `vectors[members[i]]`; without `vectors` the controller's own parameters play all of
        them. Rows with the same number in `episodes` begin at the same first frame."""
        count = len(self.codes.starts.mean)
        if count == 0:
            raise ConfigError("No first frame is encoded, so no dream can begin. Run `encode` before it.")
        dynamics, device = self.simulator.dynamics, self.codes.starts.mean.device
        chosen = torch.randint(count, (int(episodes.max()) + 1,))[torch.from_numpy(episodes)]
        latent = self.codes.starts.at(chosen.to(device)).sample()
        own = None if vectors is None else vectors[torch.from_numpy(members).to(vectors.device)]
        self.simulator.temperature = temperature
        return dream_episodes(
            self.simulator, DreamState(latent, *dynamics.initial(len(latent))),
            lambda now: self.policy(dynamics.features(now.latent, now.memory), own), horizon=self.horizon,
        )  # fmt: skip

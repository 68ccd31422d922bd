"""Environments of envpool: written in C++ and stepped by threads, several times as fast as Gymnasium's own.

Their episodes cannot be brought back to the frame, so they serve where none has to be: evolution, and evaluations
while training. Collection and the final score stay with Gymnasium's environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.base import SeedStream
from rl_lab.environments.factory import find_spec as registered
from rl_lab.environments.inspection import worker_count
from rl_lab.environments.runner import Ending, SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.shared_arrays import ON, STILL
from rl_lab.environments.vector import EndedEpisode, EpisodicVectorEnv, Replay
from rl_lab.errors import ConfigError, EnvironmentFailure
from rl_lab.records import Observation

STREAMS: tuple[SeedStream, ...] = ("eval", "evolution")


class PooledVectorEnv(EpisodicVectorEnv):
    """A pool of envpool. `reset` makes it anew: that is the only way to give each environment its seed."""

    backend = "envpool"

    def __init__(self, *, settings: EnvironmentSettings, seeds: SeedPlan) -> None:
        settings = settings.resolved()
        _require(settings)
        assert isinstance(settings.action_repeat, int)
        limit = registered(settings.id).max_episode_steps if settings.time_limit == "auto" else settings.time_limit
        self._options: dict[str, Any] = {"num_threads": worker_count(settings, seeds.num_envs)}
        self._options |= {} if limit is None else {"max_episode_steps": limit}
        self._pool = self._make(settings.id, [0])
        self._adapters = [
            SpaceAdapter(self._pool.observation_space, self._pool.action_space, settings) for _ in range(seeds.num_envs)
        ]
        first = self._adapters[0]
        super().__init__(
            settings=settings, seeds=seeds, observation_spec=first.observation_spec, action_spec=first.action_spec,
            notes=first.notes,
        )  # fmt: skip

    def _make(self, name: str, seeds: list[int]) -> Any:
        import envpool

        return envpool.make(name, env_type="gymnasium", num_envs=len(seeds), seed=seeds, **self._options)

    def _start_all(self, out: Observation, seeds: Sequence[int | None] | None) -> None:
        given = seeds or [None] * self.num_envs
        chosen = [self._seeds.seed(index, 0) if seed is None else seed for index, seed in enumerate(given)]
        self._pool = self._make(self.settings.id, [seed % 2**31 for seed in chosen])
        seen, info = self._pool.reset()
        for row, index in enumerate(info["env_id"].tolist()):
            self._adapters[index].write(seen[row], out, index, True)

    def _step_all(self, action: np.ndarray, out: Observation) -> tuple[Any, list[EndedEpisode]]:
        assert self._current is not None
        for key, value in self._current.observation.items():
            out[key][...] = value  # of those that stand still
        rewards, endings = np.zeros(self.num_envs, np.float32), list[EndedEpisode]()
        own = np.stack([np.asarray(part) for part in self._adapters[0].actions(action)])
        own = own.astype(np.int32) if own.dtype.kind == "i" else own
        left = np.flatnonzero(self._play != STILL).astype(np.int32)
        for frame in range(1, self.action_repeat + 1):
            if not len(left):
                break
            seen, reward, terminated, truncated, info = self._pool.step(own[left], left)
            over = terminated | truncated
            ids = info["env_id"]
            rewards[ids] += reward
            for row, index in enumerate(ids.tolist()):
                if over[row] or frame == self.action_repeat:
                    self._adapters[index].write(seen[row], out, index, False)
                if over[row]:
                    endings.append(self._end(index, float(rewards[index]), bool(terminated[row]), out))
            left = np.sort(ids[~over])
        self._begin_anew(endings, out)
        return rewards, sorted(endings, key=lambda item: item.index)

    def _end(self, index: int, reward: float, terminal: bool, out: Observation) -> EndedEpisode:
        last = {key: value[index].copy() for key, value in out.items()}
        return EndedEpisode(index, Ending(reward, terminal, {}), last, self._episode[index] + 1)

    def _begin_anew(self, endings: list[EndedEpisode], out: Observation) -> None:
        """The next episodes of those that play on; their seeds follow from the pool's own stream."""
        ended = np.array([item.index for item in endings], np.int32)
        again = ended[self._play[ended] == ON]
        self._play[ended] = np.where(self._play[ended] == ON, ON, STILL)
        if len(again):
            seen, info = self._pool.reset(np.sort(again))
            for row, index in enumerate(info["env_id"].tolist()):
                self._adapters[index].write(seen[row], out, index, True)

    def _replay_all(self, orders: list[Replay], out: Observation) -> tuple[list[float], list[bool], list[int]]:
        raise EnvironmentFailure("environment.backend=envpool: its episodes cannot be brought back")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def render(self) -> np.ndarray | None:
        return None

    def close(self) -> None:
        self._pool.close()


def _require(settings: EnvironmentSettings) -> None:
    if find_spec("envpool") is None:
        raise ConfigError("environment.backend=envpool: envpool is not installed: pip install 'rl-lab[envpool]'")
    import envpool

    if settings.is_atari or settings.is_dm_control or settings.id not in envpool.list_all_envs():
        raise ConfigError(
            f"environment.backend=envpool: {settings.id} is not among its environments (Atari and dm_control have a "
            "preprocessing of their own there). Use environment.backend=auto."
        )
    if settings.kwargs or settings.observation in ("pixels", "both"):
        raise ConfigError(
            "environment.backend=envpool takes environments as they are: leave environment.kwargs empty and "
            "environment.observation at auto or state."
        )

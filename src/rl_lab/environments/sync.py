"""All environments in this process, one after another: the fastest way where a step is cheap."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_lab.environments.runner import EpisodeRunner, SeedPlan, user_code
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.shared_arrays import ON, STILL
from rl_lab.environments.vector import EndedEpisode, EpisodicVectorEnv, Replay
from rl_lab.errors import RLLabError
from rl_lab.records import Observation


class SyncVectorEnv(EpisodicVectorEnv):
    """Environments stepped in this process."""

    backend = "sync"

    def __init__(self, *, settings: EnvironmentSettings, seeds: SeedPlan, render: bool = False) -> None:
        settings = settings.resolved()
        self._runners = [
            EpisodeRunner(settings=settings, index=index, seeds=seeds, render=render and index == 0)
            for index in range(seeds.num_envs)
        ]
        adapter = self._runners[0].adapter
        super().__init__(
            settings=settings,
            seeds=seeds,
            observation_spec=adapter.observation_spec,
            action_spec=adapter.action_spec,
            notes=adapter.notes,
        )
        self._convert = adapter.actions

    def _start_all(self, out: Observation, seeds: Sequence[int | None] | None) -> None:
        with user_code(self.settings.id):
            for index, runner in enumerate(self._runners):
                if self._play[index] != STILL:
                    runner.restart(0, out, index, None if seeds is None else seeds[index])
                    continue
                for value in out.values():
                    value[index] = 0

    def _step_all(self, action: np.ndarray, out: Observation) -> tuple[Any, list[EndedEpisode]]:
        rewards: list[float] = []
        endings: list[EndedEpisode] = []
        for index, (runner, chosen) in enumerate(zip(self._runners, self._convert(action), strict=True)):
            if self._play[index] == STILL:
                self._repeat_last(index, out)
                rewards.append(0.0)
                continue
            try:
                reward, ending = runner.step(chosen, out, index)
                if ending is not None:
                    last = {key: value[index].copy() for key, value in out.items()}
                    if self._play[index] == ON:
                        runner.start(runner.episode + 1, out, index)
                    else:
                        self._play[index] = STILL
                    endings.append(EndedEpisode(index, ending, last, runner.anchor))
            except RLLabError:
                raise
            except (Exception, SystemExit):
                reward = 0.0
                endings.append(self._recover(index, traceback.format_exc(), out))
            rewards.append(reward)
        return rewards, endings

    def _repeat_last(self, index: int, out: Observation) -> None:
        assert self._current is not None
        for key, value in self._current.observation.items():
            out[key][index] = value[index]

    def _recover(self, index: int, error: str, out: Observation) -> EndedEpisode:
        """Put a new environment in the place of one that raised, and begin its next episode."""
        runner, lost = self._runners[index], self._lost_episode(index, error)
        self._play[index] = ON if self._play[index] == ON else STILL
        while True:
            self._failed(index, error, restarted="it was")
            with contextlib.suppress(Exception, SystemExit):
                runner.close()
            try:
                runner.rebuild()
                runner.restart(self._episode[index] + 1, out, index)
                return lost
            except RLLabError:
                raise
            except (Exception, SystemExit):
                error = traceback.format_exc()

    def _replay_all(self, orders: list[Replay], out: Observation) -> tuple[list[float], list[bool], list[int]]:
        with user_code(self.settings.id):
            results = [
                self._runners[order.index].replay(order.anchor, order.actions, out, order.index) for order in orders
            ]
        for order in orders:
            self._runners[order.index].episode = order.episode
        rewards, firsts, episodes = zip(*results, strict=True)
        return list(rewards), list(firsts), list(episodes)

    @property
    def environments(self) -> list[Any]:
        """Gymnasium's environments, for whoever needs more than observations."""
        return [runner.environment for runner in self._runners]

    def render(self) -> np.ndarray | None:
        return self._picture(self._runners[0].frame_or_reason())

    def close(self) -> None:
        for runner in self._runners:
            runner.close()

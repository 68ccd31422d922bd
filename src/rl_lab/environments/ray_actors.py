"""Environments in actors of a Ray cluster: the same episodes as in worker processes, on as many machines as there are.

An actor that raises, hangs or dies with its node is replaced like a worker process, by one that Ray places elsewhere.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

from rl_lab import ray_cluster
from rl_lab.environments.failures import last_words
from rl_lab.environments.group import EnvironmentGroup, prepare_worker, register
from rl_lab.environments.process import registered_by_user
from rl_lab.environments.runner import SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.shared_arrays import ON, STILL, ArrayPlan, SharedArrays, anonymous_file
from rl_lab.environments.vector import EndedEpisode, EpisodicVectorEnv, Replay
from rl_lab.errors import ConfigError, EnvironmentFailure, RLLabError
from rl_lab.records import Observation

Rows = dict[str, np.ndarray]


class EnvironmentActor:
    """Some environments of a vector environment on a node. Answers hold the rows of its own environments."""

    def __init__(self, needs: ray_cluster.Needs, module: str | None, setup: bytes) -> None:
        needs.meet()
        prepare_worker(module)
        content = pickle.loads(setup)
        register(content["registered"])
        self._group = EnvironmentGroup(content)
        self._rows = np.array(content["indices"])

    def describe(self) -> Any:
        return self._group.description

    def attach(self, plan: ArrayPlan) -> None:
        descriptor = anonymous_file()
        os.ftruncate(descriptor, plan.size)
        self._group.attach(SharedArrays(plan, descriptor))
        os.close(descriptor)

    def start(self, episodes: dict[int, tuple[int, int | None]], play: np.ndarray) -> Rows:
        self._group.arrays.play[self._rows] = play
        with self._naming_the_culprit():
            self._group.start(episodes)
        return self._now()

    def step(self, action: np.ndarray, play: np.ndarray) -> tuple[Rows, np.ndarray, np.ndarray, list[Any], Rows]:
        """The next observations, rewards, which play on, the endings, and the last observations of those."""
        arrays = self._group.arrays
        arrays.action[self._rows], arrays.play[self._rows] = action, play
        with self._naming_the_culprit():
            endings = self._group.step()
        ended = [index for index, _, _ in endings]
        last = {key: value[ended] for key, value in arrays.last.items()}
        return self._now(), arrays.reward[self._rows], arrays.play[self._rows], endings, last

    def replay(self, orders: list[Replay]) -> tuple[Rows, list[Any]]:
        with self._naming_the_culprit():
            answers = self._group.replay(orders)
        return self._now(), answers

    def frame(self) -> Any:
        return self._group.frame()

    def _now(self) -> Rows:
        return {key: value[self._rows] for key, value in self._group.arrays.now.items()}

    def _naming_the_culprit(self) -> _Culprit:
        return _Culprit(self._group)


class ActorError(Exception):
    """An environment raised. `args`: its number, and the traceback."""


class _Culprit:
    """Turns an exception inside into an ActorError that says which environment was at work."""

    def __init__(self, group: EnvironmentGroup) -> None:
        self._group = group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, RLLabError):
            raise ActorError(int(self._group.arrays.busy.max()), traceback.format_exc())


class RayVectorEnv(EpisodicVectorEnv):
    """Environments in Ray actors, several per actor where there are more environments than cores in the cluster."""

    backend = "ray"

    def __init__(self, *, settings: EnvironmentSettings, seeds: SeedPlan, render: bool = False) -> None:
        settings = settings.resolved()
        self._ray = ray = ray_cluster.connect(settings.ray_address, place="environment.ray_address")
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = min(seeds.num_envs, cores if settings.workers == "auto" else settings.workers)
        if count > cores:
            raise ConfigError(
                f"environment.workers={count}: the Ray cluster has {cores} cores, one for each actor. "
                "Start more nodes, or leave it at auto."
            )
        self._needs = ray_cluster.Needs.of_this_process()
        setup = {"settings": settings, "seeds": seeds, "render": render, "registered": registered_by_user(settings)}
        self._setup, self._module = setup, settings.module
        self._actor_class = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(EnvironmentActor)
        self._timeouts = settings.worker_timeout, settings.startup_timeout
        groups = [group.tolist() for group in np.array_split(np.arange(seeds.num_envs), count)]
        self._groups = groups
        self._tasks: list[Any] = []
        self._actors = [self._launch(slot) for slot in range(count)]
        try:
            built = [self._answer(actor.describe.remote()) for actor in self._actors]
        except _LostError as failure:
            self.close()
            raise EnvironmentFailure(
                f"environment.id={settings.id}: a Ray actor could not build the environment: {failure.text}"
            ) from failure
        except BaseException:
            self.close()
            raise
        observation_spec, action_spec, notes = built[0]
        super().__init__(
            settings=settings, seeds=seeds, observation_spec=observation_spec, action_spec=action_spec, notes=notes
        )
        self._plan = ArrayPlan.of(self.num_envs, observation_spec, action_spec)
        self._ask([actor.attach.remote(self._plan) for actor in self._actors])

    def _launch(self, slot: int) -> Any:
        content = cloudpickle.dumps({**self._setup, "slot": 0, "indices": self._groups[slot]})
        return self._actor_class.remote(self._needs, self._module, content)

    def _answer(self, task: Any, *, stepping: bool = False) -> Any:
        """The result of an actor's task. Raises `_LostError` where the actor raised, hung or died."""
        errors = self._ray.exceptions
        timeout, setting = (self._timeouts[0], "worker_timeout") if stepping else (self._timeouts[1], "startup_timeout")
        try:
            return self._ray.get(task, timeout=timeout)
        except errors.GetTimeoutError as error:
            what = "the Ray actor gave no answer" if stepping else "the Ray cluster had no free core or the actor hung,"
            raise _LostError(f"{what} for {timeout:g} s, environment.{setting}") from error
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RLLabError):
                raise cause from error
            if isinstance(cause, ActorError):
                raise _LostError(cause.args[1], culprit=cause.args[0]) from error
            raise _LostError(str(error)) from error
        except errors.ObjectStoreFullError as error:
            raise ray_cluster.RayError(ray_cluster.full_store(error)) from error
        except errors.RayError as error:
            raise _LostError(f"the Ray actor is gone: {str(error).strip().splitlines()[0]}") from error

    def _ask(self, tasks: list[Any]) -> list[Any]:
        """All answers, in order. A failure here ends the run."""
        try:
            return [self._answer(task) for task in tasks]
        except _LostError as failure:
            raise EnvironmentFailure(
                f"environment.id={self.settings.id}: a Ray actor failed:\n{failure.text}"
            ) from failure

    # Stepping ---------------------------------------------------------------------------------------------------------

    def _start_all(self, out: Observation, seeds: Sequence[int | None] | None) -> None:
        first = {index: (0, None if seeds is None else seeds[index]) for index in range(self.num_envs)}
        groups = zip(self._actors, self._groups, strict=True)
        answers = self._ask([actor.start.remote(first, self._play[group]) for actor, group in groups])
        for group, rows in zip(self._groups, answers, strict=True):
            _put(rows, out, group)

    def _begin_all(self, action: np.ndarray) -> None:
        groups = zip(self._actors, self._groups, strict=True)
        self._tasks = [actor.step.remote(action[group], self._play[group]) for actor, group in groups]

    def _step_all(self, action: np.ndarray, out: Observation) -> tuple[Any, list[EndedEpisode]]:
        reward, endings = np.zeros(self.num_envs, np.float32), list[EndedEpisode]()
        failures: list[tuple[int, _LostError]] = []
        for slot, (group, task) in enumerate(zip(self._groups, self._tasks, strict=True)):
            try:
                rows, reward[group], self._play[group], ended, last = self._answer(task, stepping=True)
            except _LostError as failure:
                failures.append((slot, failure))
                continue
            _put(rows, out, group)
            for place, (index, ending, anchor) in enumerate(ended):
                endings.append(EndedEpisode(index, ending, {key: value[place] for key, value in last.items()}, anchor))
        for slot, lost in failures:
            endings += self._recover(slot, lost, out)
        return reward, sorted(endings, key=lambda item: item.index)

    def _recover(self, slot: int, failure: _LostError, out: Observation) -> list[EndedEpisode]:
        """Replace an actor; the episodes that it was playing are cut off and the next ones begun."""
        group = self._groups[slot]
        lost = [self._lost_episode(index, failure.text) for index in group]
        self._play[group] = np.where(self._play[group] == ON, ON, STILL)
        episodes: dict[int, tuple[int, int | None]] = {index: (self._episode[index] + 1, None) for index in group}
        while True:
            self._ray.kill(self._actors[slot])
            self._failed(
                failure.culprit if failure.culprit in group else group[0], failure.text, restarted="its actor was"
            )
            try:
                actor = self._actors[slot] = self._launch(slot)
                self._answer(actor.attach.remote(self._plan))
                rows = self._answer(actor.start.remote(episodes, self._play[group]))
            except _LostError as error:
                failure = error
                continue
            _put(rows, out, group)
            return lost

    def _replay_all(self, orders: list[Replay], out: Observation) -> tuple[list[float], list[bool], list[int]]:
        groups = zip(self._actors, self._groups, strict=True)
        answers = self._ask([actor.replay.remote([orders[index] for index in group]) for actor, group in groups])
        for group, (rows, _) in zip(self._groups, answers, strict=True):
            _put(rows, out, group)
        results = sorted(item for _, share in answers for item in share)
        return [item[1] for item in results], [item[2] for item in results], [item[3] for item in results]

    def render(self) -> np.ndarray | None:
        try:
            return self._picture(self._answer(self._actors[0].frame.remote()))
        except _LostError as failure:  # the next step replaces the actor
            return self._picture(last_words(failure.text))

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []


class _LostError(Exception):
    """An actor did not answer as it should. `culprit`: the environment that was at work, where that is known."""

    def __init__(self, text: str, *, culprit: int = -1) -> None:
        super().__init__(text)
        self.text, self.culprit = text, culprit


def _put(rows: Rows, out: Observation, group: list[int]) -> None:
    for key, value in rows.items():
        out[key][group] = value

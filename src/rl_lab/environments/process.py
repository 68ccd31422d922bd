"""Environments in worker processes: for those whose step costs more than a message. Workers that fail are replaced."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments import worker as protocol
from rl_lab.environments.failures import last_words
from rl_lab.environments.families import family_of
from rl_lab.environments.inspection import EnvironmentFacts, worker_count
from rl_lab.environments.runner import SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.shared_arrays import ON, STILL, ArrayPlan, SharedArrays, anonymous_file
from rl_lab.environments.vector import EndedEpisode, EpisodicVectorEnv, Replay
from rl_lab.environments.worker_handle import WorkerError, WorkerHandle
from rl_lab.errors import EnvironmentFailure
from rl_lab.records import Observation


def probe_in_worker(settings: EnvironmentSettings) -> EnvironmentFacts:
    """`probe` in a process of its own, which may hang or die."""
    arrays_fd = anonymous_file()
    setup = {"settings": settings, "registered": registered_by_user(settings), "probe": True}
    try:
        worker = WorkerHandle(slot=0, indices=[], arrays_fd=arrays_fd, setup=setup)
        try:
            facts: EnvironmentFacts = worker.answer(settings.startup_timeout, "startup_timeout")
        finally:
            worker.close(kindly=False)
    except WorkerError as failure:
        raise EnvironmentFailure(
            f"environment.id={settings.id} cannot be played: {last_words(str(failure))}. It was tried for a moment in a"
            " process of its own before the run; the environment must neither hang nor end its process."
        ) from failure
    finally:
        os.close(arrays_fd)
    return facts


class ProcessVectorEnv(EpisodicVectorEnv):
    """Environments in worker processes, several per worker where there are more environments than cores."""

    backend = "process"

    def __init__(self, *, settings: EnvironmentSettings, seeds: SeedPlan, render: bool = False) -> None:
        settings = settings.resolved()
        self._arrays_fd = anonymous_file()
        self._setup = {
            "settings": settings,
            "seeds": seeds,
            "render": render,
            "registered": registered_by_user(settings),
        }
        groups = np.array_split(np.arange(seeds.num_envs), worker_count(settings, seeds.num_envs))
        self._workers: list[WorkerHandle] = []
        self._unreached: dict[int, str] = {}  # workers that could not be told to step, and why
        self._timeouts = settings.worker_timeout, settings.startup_timeout
        try:
            for slot, group in enumerate(groups):
                self._workers.append(self._launch(slot, group.tolist()))
            built = [worker.answer(settings.startup_timeout, "startup_timeout") for worker in self._workers]
        except WorkerError as failure:
            self._end_workers(kindly=False)
            raise EnvironmentFailure(
                f"environment.id={settings.id}: a worker process could not build the environment:\n{failure}"
            ) from failure
        except BaseException:
            self._end_workers(kindly=False)
            raise
        observation_spec, action_spec, notes = built[0]
        super().__init__(
            settings=settings, seeds=seeds, observation_spec=observation_spec, action_spec=action_spec, notes=notes
        )
        self._plan = ArrayPlan.of(self.num_envs, observation_spec, action_spec)
        os.ftruncate(self._arrays_fd, self._plan.size)
        self._arrays = SharedArrays(self._plan, self._arrays_fd)
        self._play = self._arrays.play
        self._ask(self._workers, [(protocol.ATTACH, self._plan)] * len(self._workers))

    def _launch(self, slot: int, indices: list[int]) -> WorkerHandle:
        return WorkerHandle(slot=slot, indices=indices, arrays_fd=self._arrays_fd, setup=self._setup)

    def _ask(self, workers: list[WorkerHandle], orders: list[tuple[bytes, Any]]) -> list[Any]:
        """Give every worker its order, then collect the answers. A failure here ends the run."""
        try:
            for worker, (command, content) in zip(workers, orders, strict=True):
                worker.order(command, content)
            return [worker.answer(self._timeouts[1], "startup_timeout") for worker in workers]
        except WorkerError as failure:
            raise EnvironmentFailure(f"environment.id={self.settings.id}: a worker failed:\n{failure}") from failure

    def _copy_out(self, out: Observation) -> None:
        for key, value in self._arrays.now.items():
            out[key][...] = value

    # Stepping ---------------------------------------------------------------------------------------------------------

    def _start_all(self, out: Observation, seeds: Sequence[int | None] | None) -> None:
        first = {index: (0, None if seeds is None else seeds[index]) for index in range(self.num_envs)}
        self._ask(self._workers, [(protocol.START, first)] * len(self._workers))
        self._copy_out(out)

    def _begin_all(self, action: np.ndarray) -> None:
        self._arrays.action[...] = action
        self._unreached = {}
        for worker in self._workers:
            try:
                worker.send(protocol.STEP)
            except WorkerError as failure:
                self._unreached[worker.slot] = str(failure)

    def _step_all(self, action: np.ndarray, out: Observation) -> tuple[Any, list[EndedEpisode]]:
        failures: list[tuple[WorkerHandle, str]] = []
        endings: list[EndedEpisode] = []
        for worker in self._workers:
            if worker.slot in self._unreached:
                failures.append((worker, self._unreached[worker.slot]))
                continue
            try:
                for index, ending, anchor in worker.answer(self._timeouts[0]) or ():
                    last = {key: value[index].copy() for key, value in self._arrays.last.items()}
                    endings.append(EndedEpisode(index, ending, last, anchor))
            except WorkerError as failure:
                failures.append((worker, str(failure)))
        for worker, error in failures:
            endings += self._recover(worker, error)
        endings.sort(key=lambda item: item.index)
        self._copy_out(out)
        return self._arrays.reward.copy(), endings

    def _recover(self, worker: WorkerHandle, error: str) -> list[EndedEpisode]:
        """Replace a worker; the episodes that it was playing are cut off and the next ones begun."""
        lost = [self._lost_episode(index, error) for index in worker.indices]
        self._play[worker.indices] = np.where(self._play[worker.indices] == ON, ON, STILL)
        episodes = {index: (self._episode[index] + 1, None) for index in worker.indices}
        while True:
            culprit = int(self._arrays.busy[worker.slot])
            if culprit not in worker.indices:
                culprit = worker.indices[0]
            worker.close(kindly=False)
            self._failed(culprit, error, restarted="its worker was")
            try:
                worker = self._workers[worker.slot] = self._launch(worker.slot, worker.indices)
                worker.answer(self._timeouts[1], "startup_timeout")
                worker.order(protocol.ATTACH, self._plan)
                worker.answer(self._timeouts[1], "startup_timeout")
                worker.order(protocol.START, episodes)
                worker.answer(self._timeouts[1], "startup_timeout")
                return lost
            except WorkerError as failure:
                error = str(failure)

    def _replay_all(self, orders: list[Replay], out: Observation) -> tuple[list[float], list[bool], list[int]]:
        groups = [[orders[index] for index in worker.indices] for worker in self._workers]
        answers = self._ask(self._workers, [(protocol.REPLAY, group) for group in groups])
        self._copy_out(out)
        results = sorted(item for answer in answers for item in answer)
        return [item[1] for item in results], [item[2] for item in results], [item[3] for item in results]

    def render(self) -> np.ndarray | None:
        if self._sent is not None:
            raise EnvironmentFailure("render() was called before the step under way was received")
        worker = self._workers[0]
        try:
            worker.order(protocol.RENDER)
            return self._picture(worker.answer(self._timeouts[0]))
        except WorkerError as failure:  # the next step replaces the worker
            return self._picture(last_words(str(failure)))

    def close(self) -> None:
        self._end_workers(kindly=True)

    def _end_workers(self, *, kindly: bool) -> None:
        for worker in self._workers:
            worker.close(kindly=kindly)
        self._workers = []
        if self._arrays_fd >= 0:
            os.close(self._arrays_fd)
            self._arrays_fd = -1


def registered_by_user(settings: EnvironmentSettings) -> list[Any]:
    """The registration of an id that only this process may know: a class in a script travels whole (cloudpickle)."""
    name = settings.id.rpartition(":")[2]
    spec = gymnasium.registry.get(name)
    return [] if spec is None or family_of(settings.id) is not None else [spec]

"""The environments of one worker: what a worker process and a Ray actor do at the parent's word."""

from __future__ import annotations

from typing import Any

from rl_lab.environments.runner import EpisodeRunner
from rl_lab.environments.shared_arrays import ON, STILL, SharedArrays


def prepare_worker(module: str | None) -> None:
    """The user's module comes first: what was registered there cannot be unpickled without it."""
    from rl_lab.environments.factory import import_user_module
    from rl_lab.environments.headless import prepare_rendering

    prepare_rendering()
    import_user_module(module)


def register(specs: list[Any]) -> None:
    """Know the environments that only the parent's program had registered."""
    import gymnasium

    for spec in specs:
        gymnasium.registry.setdefault(spec.id, spec)


class EnvironmentGroup:
    """Runners by their number in the vector environment. They read and write the rows of arrays of all environments."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._slot = setup["slot"]
        self.runners = {
            index: EpisodeRunner(
                settings=setup["settings"], index=index, seeds=setup["seeds"], render=setup["render"] and index == 0
            )
            for index in setup["indices"]
        }
        adapter = next(iter(self.runners.values())).adapter
        self.indices, self._convert = list(self.runners), adapter.actions
        self.description = (adapter.observation_spec, adapter.action_spec, adapter.notes)

    def attach(self, arrays: SharedArrays) -> None:
        self.arrays = arrays

    def start(self, episodes: dict[int, tuple[int, int | None]]) -> None:
        """Begin the given episode in each environment, with another seed than its own where one is given."""
        for index, runner in self.runners.items():
            if self.arrays.play[index] == STILL:
                continue
            self.arrays.busy[self._slot] = index
            runner.restart(episodes[index][0], self.arrays.now, index, episodes[index][1])

    def step(self) -> list[Any]:
        """One decision in each: (index, ending, anchor) of the episodes that ended, begun anew already."""
        now, last, reward, busy = self.arrays.now, self.arrays.last, self.arrays.reward, self.arrays.busy
        play = self.arrays.play
        endings = []
        for index, action in zip(self.indices, self._convert(self.arrays.action[self.indices]), strict=True):
            if play[index] == STILL:
                reward[index] = 0.0
                continue
            busy[self._slot] = index
            runner = self.runners[index]
            reward[index], ending = runner.step(action, now, index)
            if ending is not None:
                for key, value in now.items():
                    last[key][index] = value[index]
                if play[index] == ON:
                    runner.start(runner.episode + 1, now, index)
                else:
                    play[index] = STILL
                endings.append((index, ending, runner.anchor))
        return endings

    def replay(self, orders: list[Any]) -> list[Any]:
        """Bring environments back: (index, last reward, whether an episode begins there, the episode reached)."""
        answers = []
        for order in orders:
            self.arrays.busy[self._slot] = order.index
            runner = self.runners[order.index]
            answers.append((order.index, *runner.replay(order.anchor, order.actions, self.arrays.now, order.index)))
            runner.episode = order.episode
        return answers

    def frame(self) -> Any:
        """A picture of environment 0, or why there is none."""
        return self.runners[0].frame_or_reason()

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()

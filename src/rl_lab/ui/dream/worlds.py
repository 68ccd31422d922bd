"""The real side of a dream: an environment that can be brought to any moment, or an episode that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_lab.environments.runner import EpisodeRunner, SeedPlan
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.records import Fields, Observation, split_observation


@dataclass(frozen=True)
class Seen:
    """A moment of the real world. `has_ended`: no action follows; `is_terminal`: for good, not by a time limit."""

    observation: Observation
    reward: float = 0.0
    has_ended: bool = False
    is_terminal: bool = False


class World(Protocol):
    """A sequence of moments that depends on the actions alone."""

    def reset(self) -> Seen: ...

    def step(self, action: np.ndarray) -> Seen | None:
        """The next moment; None where this world cannot follow the action."""

    def render(self) -> np.ndarray | None: ...

    def close(self) -> None: ...


def go_to(world: World, actions: Sequence[np.ndarray]) -> Seen | None:
    """Begin anew and take these actions: a deterministic world is then exactly where it was."""
    seen: Seen | None = world.reset()
    for action in actions:
        if seen is None or seen.has_ended:
            return None
        seen = world.step(action)
    return seen


class LiveWorld:
    """The run's environment, playing one held-out episode: the same as number `episode` of a final evaluation."""

    def __init__(self, settings: EnvironmentSettings, *, seed: int, episode: int = 0, render: bool = True) -> None:
        self.episode = episode
        settings = self.settings = settings.resolved().for_evaluation()
        self.runner = EpisodeRunner(settings=settings, index=0, seeds=SeedPlan(seed, "final", 1), render=render)
        spec = self.runner.adapter.observation_spec
        self._out = {key: np.empty((1, *own.shape), own.dtype) for key, own in spec.items()}

    def reset(self) -> Seen:
        self.runner.restart(self.episode, self._out, 0)
        return Seen(self._copy())

    def step(self, action: np.ndarray) -> Seen:
        chosen = self.runner.adapter.actions(action[None])[0]
        reward, ending = self.runner.step(chosen, self._out, 0)
        if ending is None:
            return Seen(self._copy(), float(reward))
        return Seen(self._copy(), float(reward), True, ending.is_terminal)

    def render(self) -> np.ndarray | None:
        return self.runner.render()

    def close(self) -> None:
        self.runner.close()

    def _copy(self) -> Observation:
        return {key: value[0].copy() for key, value in self._out.items()}


class RecordedWorld:
    """An episode that was recorded: it follows the recorded actions, and no others."""

    def __init__(self, record: Fields) -> None:
        self.record = record
        self._time = 0

    @property
    def actions(self) -> list[np.ndarray]:
        return list(self.record["action"][:-1])

    def reset(self) -> Seen:
        self._time = 0
        return self._at(0)

    def step(self, action: np.ndarray) -> Seen | None:
        if self._time + 1 >= len(self.record["action"]):
            return None
        if not np.array_equal(np.asarray(action), self.record["action"][self._time]):
            return None
        self._time += 1
        return self._at(self._time)

    def render(self) -> np.ndarray | None:
        return None

    def close(self) -> None:
        """Nothing is open."""

    def _at(self, time: int) -> Seen:
        row: dict[str, Any] = {name: value[time] for name, value in self.record.items()}
        observation, rest = split_observation(row)
        ended = bool(rest["is_last"]) or time + 1 == len(self.record["action"])
        return Seen(observation, float(rest["reward"]), ended, bool(rest["is_terminal"]))

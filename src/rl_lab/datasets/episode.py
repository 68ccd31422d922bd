"""An episode as files hold it, and the same episode as RL Lab's records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rl_lab.errors import DataError
from rl_lab.records import OBSERVATION_PREFIX, Fields

MissingLast = Literal["auto", "drop", "repeat"]
Alignment = Literal["after", "before"]


@dataclass(frozen=True)
class Episode:
    """T decisions in order. `action[t]` was chosen after seeing observation t, and `reward[t]` followed it.

    `observation` has T + 1 rows, or T where the last observation was not kept. An episode that is not terminated was
    cut off: by a time limit, or because recording stopped.
    """

    observation: dict[str, np.ndarray]  # each [T + 1 or T, ...]
    action: np.ndarray  # [T, ...]
    reward: np.ndarray | None  # [T]; None: the data have no rewards
    terminated: bool
    seed: int | None = None  # of the environment's reset, where it is known

    @property
    def decisions(self) -> int:
        return len(self.action)

    @property
    def observations(self) -> int:
        """Number of observations; the number of decisions plus one where no observation is stored here."""
        return len(next(iter(self.observation.values()))) if self.observation else self.decisions + 1

    @property
    def is_complete(self) -> bool:
        """Whether the observation after the last action was kept."""
        return self.observations == self.decisions + 1

    def with_last_observation(self, missing: MissingLast) -> Episode:
        """The same episode with T + 1 observations.

        Where the last one was not kept, `drop` leaves out the last action, and with it the last reward; `repeat` takes
        the observation before it once more. `auto` repeats where the episode terminated, whose end and last reward
        would otherwise be lost, and drops elsewhere.
        """
        if self.is_complete:
            return self
        if missing == "repeat" or (missing == "auto" and self.terminated):
            observation = {key: np.concatenate([value, value[-1:]]) for key, value in self.observation.items()}
            return replace(self, observation=observation)
        reward = None if self.reward is None else self.reward[:-1]
        return replace(self, action=self.action[:-1], reward=reward, terminated=False)

    def aligned(self, alignment: Alignment) -> Episode:
        """`before`: row t of the stored action is the one that led to observation t (Dreamer's layout), and row t of
        the stored reward came with it; both move to where they belong here."""
        if alignment == "after":
            return self
        if self.observations != self.decisions:
            raise DataError(
                f"alignment=before needs as many actions as observations, and an episode has {self.decisions} and "
                f"{self.observations}."
            )
        reward = None if self.reward is None else self.reward[1:]
        return replace(self, action=self.action[1:], reward=reward)

    def to_records(self) -> Fields:
        """T + 1 records in RL Lab's layout: a reward stands with the observation that it arrived with, the last record
        has a zero action. Rewards that are missing are zeros. The episode must be complete."""
        count = self.decisions + 1
        fields: Fields = {OBSERVATION_PREFIX + key: value for key, value in self.observation.items()}
        action = np.zeros((count, *self.action.shape[1:]), self.action.dtype)
        action[:-1] = self.action
        reward = np.zeros(count, np.float32)
        if self.reward is not None:
            reward[1:] = self.reward
        flags = {name: np.zeros(count, bool) for name in ("is_first", "is_last", "is_terminal")}
        flags["is_first"][0], flags["is_last"][-1], flags["is_terminal"][-1] = True, True, self.terminated
        return {**fields, "action": action, "reward": reward, **flags}

    @classmethod
    def from_records(cls, fields: Fields, *, rewarded: bool = True) -> Episode:
        """From consecutive records of one episode. Where the last one is not `is_last`, what followed was not recorded,
        and its action is left out."""
        start = len(OBSERVATION_PREFIX)
        observation = {name[start:]: value for name, value in fields.items() if name.startswith(OBSERVATION_PREFIX)}
        reward = np.asarray(fields["reward"][1:], np.float32) if rewarded else None
        return cls(observation, fields["action"][:-1], reward, bool(fields["is_terminal"][-1]))


@dataclass(frozen=True)
class Attributes:
    """Facts that a dataset states about itself. Files of other programs state few of them."""

    environment: str | None = None  # the id
    action_units: Literal["environment", "agent"] = "environment"  # agent: [-1, 1] and classes from 0
    recorded_from: str | None = None  # a run or an expert
    further: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "action_units": self.action_units,
            "recorded_from": self.recorded_from,
            **self.further,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Attributes:
        known = ("environment", "action_units", "recorded_from")
        further = {name: value for name, value in values.items() if name not in known}
        return cls(**{name: values[name] for name in known if name in values}, further=further)

"""The moments that were played, as a tree: each knows its parent, so that any can be gone back to and left anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rl_lab.records import Observation
from rl_lab.simulation.simulator import ModelState
from rl_lab.ui.dream.model import Belief, PlanMemory
from rl_lab.ui.dream.worlds import Seen

Picture = tuple[dict[str, Any], bytes]


@dataclass
class Moment:
    """One moment of a branch: reality where it was played, and the dream beside it.

    `since` is the time of the last moment that the model saw: at it, the dreamed state is what the model made of the
    observation; after it, the model dreams.
    """

    number: int
    parent: Moment | None
    time: int
    action: np.ndarray | None  # that led here; None at the start
    real: Seen | None = None
    belief: Belief | None = None  # the model's, with every observation seen
    belief_random: Tensor | None = None  # torch's stream after it
    dream: ModelState | None = None
    dream_random: Tensor | None = None
    since: int = 0
    dream_reward: float | None = None
    continuation: float | None = None
    value: float | None = None
    surprise: float | None = None
    dreamed: Observation = field(default_factory=dict)
    agent_state: Mapping[str, Any] | None = None  # the agent's memory before it acts here
    plan_memory: PlanMemory | None = None
    error: float | None = None
    baseline: float | None = None
    driver: str = ""
    pictures: dict[str, Picture] = field(default_factory=dict)

    def path(self) -> list[Moment]:
        """From the start to here."""
        found: list[Moment] = []
        moment: Moment | None = self
        while moment is not None:
            found.append(moment)
            moment = moment.parent
        return found[::-1]

    def actions(self) -> list[np.ndarray]:
        return [moment.action for moment in self.path() if moment.action is not None]

    def at(self, time: int) -> Moment:
        """The moment of this branch at an earlier time."""
        moment = self
        while moment.time > time and moment.parent is not None:
            moment = moment.parent
        return moment


class Tape:
    """All moments by number. What was played of a moment never changes; a reality that was left out may be added."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def add(self, parent: Moment | None, action: np.ndarray | None) -> Moment:
        moment = Moment(len(self.moments), parent, 0 if parent is None else parent.time + 1, action)
        self.moments.append(moment)
        return moment

    def __len__(self) -> int:
        return len(self.moments)

    def leaves(self) -> list[Moment]:
        """The last moments of all branches."""
        parents = {moment.parent.number for moment in self.moments if moment.parent is not None}
        return [moment for moment in self.moments if moment.number not in parents]

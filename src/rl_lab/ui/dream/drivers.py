"""Who acts in a dream: you, the run's agent, a planner, or the actions of a record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState
from rl_lab.ui.dream.model import PlanMemory
from rl_lab.ui.dream.streams import preserved_random, seed_of
from rl_lab.ui.dream.tape import Moment

if TYPE_CHECKING:
    from rl_lab.ui.dream.session import DreamSession

BURN_IN = 64  # moments that the agent's memory is brought up to date with when it takes over


class Drivers:
    """Chooses the next action of a session."""

    def __init__(self, session: DreamSession) -> None:
        self.session = session
        self._next_memory: dict[str, Any] | None = None  # the agent's, after the action that it chose last
        self._next_plan: PlanMemory | None = None  # the planner's, after its last plan

    def choose(self, held: np.ndarray | None) -> np.ndarray | None:
        """The next action of the present driver; None where nobody acts now."""
        driver = self.session.options.driver
        if driver == "agent":
            return self.agent_action()
        if driver == "planner":
            return self._planned_action()
        if driver == "recorded":
            return self._recorded_action()
        return held

    def _recorded_action(self) -> np.ndarray | None:
        if self.session.record is None:
            raise ConfigError("There are no recorded actions: begin from a replayed episode.")
        time = self.session.current.time
        return self.session.record["action"][time] if time < len(self.session.record["action"]) - 1 else None

    def agent_action(self) -> np.ndarray | None:
        """The run's agent on what is real; where there is no reality, the model's own policy on the dream."""
        current = self.session.current
        with self.acting_random():
            if self.session.options.world != "dream" and current.real is not None:
                return None if current.real.has_ended else self._act()
            action = self.session.model.policy_action(current.dream)
            if action is not None:
                return action
            if self.session.model.has_planner:
                return self._planned_action("own")
            observation = {key: value[None] for key, value in current.dreamed.items()}
            if not observation:
                raise ConfigError("In this dream the agent cannot act: the model has neither a policy nor pictures.")
            workflow = self.session.model.workflow
            return workflow.act(observation, workflow.initial_state(1), mode="eval")[0][0]

    def _act(self) -> np.ndarray:
        """`workflow.act` on the real observation, with a memory of the observations before it."""
        path = self.session.current.path()
        known = max(index for index, moment in enumerate(path) if moment.agent_state is not None)
        if len(path) - known > BURN_IN:
            known = len(path) - BURN_IN
            path[known].agent_state = self.session.model.workflow.initial_state(1)
        action: np.ndarray | None = None
        for moment, following in zip(path[known:], [*path[known + 1 :], None], strict=True):
            assert moment.real is not None
            batch = {key: value[None] for key, value in moment.real.observation.items()}
            with self.acting_random(moment.time):
                chosen, memory = self.session.model.workflow.act(batch, dict(moment.agent_state or {}), mode="eval")
            action = chosen[0]
            taken = action if following is None else following.action
            self._next_memory = _with_action(memory, self.session.model.encode(np.asarray(taken)))
            if following is not None:
                following.agent_state = self._next_memory
        assert action is not None
        return action

    def remember(self, moment: Moment) -> None:
        """Store the memory of agent and planner after their last choice with the moment that the choice led to."""
        memory = self._next_memory
        if memory is not None and self.session.options.driver == "agent" and self.session.options.world != "dream":
            moment.agent_state = memory
        moment.plan_memory = self._next_plan
        self._next_memory = self._next_plan = None

    def state_to_plan_from(self, moment: Moment) -> ModelState:
        """The model's belief after real observations where there are any, else the dreamed state."""
        return moment.dream if self.session.options.world == "dream" or moment.belief is None else moment.belief.state

    def _planned_action(self, name: str | None = None) -> np.ndarray:
        state = self.state_to_plan_from(self.session.current)
        with self.acting_random():
            name = name or self.session.options.planner
            plan, _ = self.session.model.plan(state, self.session.current.plan_memory, name)
        plan.require_finite()
        self._next_plan = name, plan.memory
        return self.session.model.decode_action(plan.action)

    @contextmanager
    def acting_random(self, time: int | None = None) -> Iterator[None]:
        """Choices depend on the session and the time, not on what was drawn elsewhere: a branch can be repeated."""
        session = self.session
        with preserved_random():
            moment = session.current.time if time is None else time
            torch.manual_seed(seed_of(session.seed, session.episode, moment))
            yield


def _with_action(memory: dict[str, Any], encoded: torch.Tensor) -> dict[str, Any]:
    """A memory that holds the last action holds the one that was taken, whoever chose it."""
    return memory | {"action": encoded.to(memory["action"].dtype)} if "action" in memory else memory

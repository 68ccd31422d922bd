"""Model predictive control: plan, take the first action, plan again. Nothing is learned; the model is given."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from rl_lab.components.actions import ActionCodec
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.records import Observation
from rl_lab.simulation.simulator import Simulator
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import MetricsSink, WorkflowContext


class MPC(Workflow):
    """A planner in a simulator, all environments planned in one call. The agent's memory is the planner's."""

    name = "mpc"
    update_hooks: ClassVar[tuple[str, ...]] = ()

    def _bind_context(self, context: WorkflowContext) -> None:
        self.planner = context.controller("planner", Planner)
        self.codec = ActionCodec(context.action_spec)
        context.simulator.attach(self._simulator(context))
        self.planner.attach(context.simulator)
        self._expected = 0.0  # what the plans of the last decision promised

    def _simulator(self, context: WorkflowContext) -> Simulator:
        return context.component("simulator", Simulator)

    def initial_state(self, num_envs: int) -> AgentState:
        return self.planner.initial_memory(num_envs)

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        with torch.no_grad():
            plan = self.plan(observation, state)
        plan.require_finite()
        if mode == "train":
            self._expected = float(plan.value.mean())
        action: np.ndarray = self.codec.decode(self._choose(plan, mode)).cpu().numpy()
        return action, plan.memory

    def plan(self, observation: Observation, state: AgentState) -> Plan:
        """What would be done now, and what else was considered."""
        seen = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        return self.planner.plan(self.planner.simulator.observe(seen), state)

    def _choose(self, plan: Plan, mode: Mode) -> torch.Tensor:
        return plan.action

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        writer.scalar("planner/expected_return", self._expected)

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"expected": self._expected}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._expected = state["expected"]

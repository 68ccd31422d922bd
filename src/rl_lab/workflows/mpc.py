"""Model predictive control: plan, take the first action, plan again. Nothing is learned; the model is given."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from rl_lab.components.actions import ActionCodec
from rl_lab.components.planners.base import Plan, Planner
from rl_lab.records import ImaginedRollout, Observation, SequenceBatch
from rl_lab.simulation.simulator import ModelState, Simulator
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
        self._plan_metrics: dict[str, float] = {}  # and what else the planner says of them

    def _simulator(self, context: WorkflowContext) -> Simulator:
        return context.component("simulator", Simulator)

    def initial_state(self, num_envs: int) -> AgentState:
        return self.planner.initial_memory(num_envs)

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        plan, _ = self.plan(observation, state)
        plan.require_finite()
        if mode == "train":
            self._expected = float(plan.value.mean())
            self._plan_metrics = {name: float(value.mean()) for name, value in plan.metrics().items()}
        action: np.ndarray = self.codec.decode(self._choose(plan, mode)).cpu().numpy()
        return action, plan.memory

    @torch.no_grad()
    def plan(self, observation: Observation, state: AgentState) -> tuple[Plan, ModelState]:
        seen = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        start = self.planner.simulator.observe(seen)
        return self.planner.plan(start, state, observation=seen), start

    def _choose(self, plan: Plan, mode: Mode) -> torch.Tensor:
        return plan.action

    def imagine(self, batch: SequenceBatch, *, context: int) -> ImaginedRollout:
        """Begin at the last of the `context` records and predict the others from their actions alone."""
        simulator, last = self.planner.simulator, context - 1
        start = simulator.observe({key: value[:, last] for key, value in batch.observation.items()})
        rollout = simulator.rollout(start, self.codec.encode(batch.action)[:, last:-1])
        seen = [simulator.observation(state) for state in rollout.states[1:]]
        imagined, first = {}, batch.reward[:, :context]
        for key in (key for key, spec in self.context.observation_spec.items() if spec.kind == "vector"):
            value = batch.observation[key]
            ahead = torch.stack([parts[key] for parts in seen], 1)
            imagined[key] = torch.cat([value[:, :context].to(ahead.dtype), ahead], 1).cpu().numpy()
        goes_on = torch.cat([torch.ones_like(first), rollout.continuation.cumprod(1).float()], 1)
        return ImaginedRollout(
            context=context,
            real={key: value.cpu().numpy() for key, value in batch.observation.items()},
            imagined=imagined,
            real_reward=batch.reward.cpu().numpy(),
            imagined_reward=torch.cat([first, rollout.reward.float()], 1).cpu().numpy(),
            imagined_continue=goes_on.cpu().numpy(),
        )

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        writer.scalar("planner/expected_return", self._expected)
        for name, value in self._plan_metrics.items():
            writer.scalar(f"planner/{name}", value)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"expected": self._expected, "plan_metrics": dict(self._plan_metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._expected, self._plan_metrics = state["expected"], dict(state.get("plan_metrics", {}))

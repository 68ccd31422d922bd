"""Behaviour cloning: a policy learns to do what the data did. Nothing else is learned; rollouts only evaluate it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from rl_lab.components.acting import LearningController
from rl_lab.metrics.values import Metrics
from rl_lab.records import OBSERVATION_PREFIX, Batch, BatchSpec, Observation
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext


class BehaviourCloning(Workflow):
    """The policy brings its own loss (see `rl_lab.components.actors.bc`), and may be any controller that learns."""

    name: ClassVar[str] = "bc"
    update_hooks: ClassVar[tuple[str, ...]] = ("update",)

    def __init__(self, *, batch_size: int = 256) -> None:
        self.batch_size = batch_size  # sequences; their length is the policy's

    def _bind_context(self, context: WorkflowContext) -> None:
        self.policy = context.controller("policy", LearningController)

    def initial_state(self, num_envs: int) -> AgentState:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: AgentState, is_first: np.ndarray) -> AgentState:
        return self.policy.reset_state(state, is_first)

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        return self.policy.act(observation, state, mode=mode)

    def batch_spec(self) -> BatchSpec:
        """Rewards are not asked for: demonstrations need none."""
        fields = (*(OBSERVATION_PREFIX + key for key in self.context.observation_spec), "action")
        return self.policy.batch_spec(str(self.context.device))._replace(batch_size=self.batch_size, fields=fields)

    def update(self, batch: Batch, *, phase: PhaseView) -> Metrics:
        """One gradient step on the policy's loss."""
        return self._teach("policy", batch, phase)

    def batch_losses(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"policy": self.policy.loss(batch)[0]}

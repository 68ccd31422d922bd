"""Uniform actions and nothing learned: for recording, warming up and measuring the loop itself."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from rl_lab.metrics.values import Metrics
from rl_lab.records import BatchSpec, Observation, SequenceBatch
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView


class RandomWorkflow(Workflow):
    """Acts uniformly at random. Its `update` draws a batch and learns nothing, so that data paths can be measured."""

    name: ClassVar[str] = "random"
    update_hooks: ClassVar[tuple[str, ...]] = ("update",)

    def __init__(self, *, batch_size: int = 16, sequence_length: int = 16, train_ratio: float = 0.0) -> None:
        self._batch_size, self._sequence_length, self._train_ratio = batch_size, sequence_length, train_ratio

    @property
    def updates_per_env_step(self) -> float:
        return self._train_ratio

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """While it collects, actions come from the run's own stream; in evaluation from torch's, which it seeds."""
        if mode == "train" and self.context.train_envs is not None:
            return self.random_action(), state
        count = len(next(iter(observation.values())))
        spec = self.context.action_spec
        if spec.kind == "continuous":
            return torch.empty(count, *spec.shape).uniform_(-1.0, 1.0).numpy(), state
        draws = [torch.randint(classes, (count,), dtype=torch.int32) for classes in spec.classes]
        return torch.stack(draws, -1).numpy(), state

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self._batch_size, self._sequence_length, device=str(self.context.device))

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """Nothing is learned; the mean reward shows that data arrived."""
        return {"batch_reward": batch.reward.mean()}

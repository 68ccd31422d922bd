"""Interfaces of whatever chooses actions: a controller that acts by itself, and one that also learns from the batches
of any workflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.metrics.values import Metrics
from rl_lab.records import Batch, BatchSpec, Observation

Mode = Literal["train", "eval"]
AgentState = dict[str, Tensor]  # the agent's memory, environments first; zeros mean "no memory"


def clear_memory(state: AgentState, is_first: np.ndarray) -> AgentState:
    """The memory with zeros for the environments that start an episode."""
    if not state or not is_first.any():
        return state
    keep = torch.from_numpy(~is_first)
    return {
        name: value * keep.to(value.device, value.dtype).view(-1, *[1] * (value.ndim - 1))
        for name, value in state.items()
    }


class Acts(Protocol):
    """Whatever can play episodes: a workflow, or an acting controller."""

    def initial_state(self, num_envs: int) -> AgentState: ...

    def reset_state(self, state: AgentState, is_first: np.ndarray) -> AgentState: ...

    def act(
        self, observation: Observation, state: AgentState, *, mode: Mode = "eval"
    ) -> tuple[np.ndarray, AgentState]: ...


class ActingController(nn.Module, ABC):
    """A controller that can stand in a phase, an evaluation or a recording as whoever acts."""

    def initial_state(self, num_envs: int) -> AgentState:
        """The memory before the first observation: zeros."""
        return {}

    def reset_state(self, state: AgentState, is_first: np.ndarray) -> AgentState:
        """Clear the memory of the environments that start an episode."""
        return clear_memory(state, is_first)

    @abstractmethod
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Actions [env, *action] for a batch of environments, and the memory after them."""


class LearningController(ActingController):
    """A controller with a loss. `ControllerManager.learn` steps the optimiser that has the name of its role."""

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss, and values to watch. The batch is any workflow's: sequences, or decisions of a rollout."""

    @abstractmethod
    def batch_spec(self, device: str) -> BatchSpec:
        """The batches that it would choose where the workflow has no updates of its own."""

    def use_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Told, before each batch of a dataset, the statistics of its fields (`FieldStatistics` by name)."""

    def after_update(self) -> None:
        """Told after each step of the optimiser (moving averages)."""

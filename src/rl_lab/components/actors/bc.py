"""A policy that learns from demonstrations: behaviour cloning, with or without memory, from vectors and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.acting import AgentState, LearningController, Mode
from rl_lab.components.actors.bc_heads import make_head
from rl_lab.components.encoders import MultiKeyEncoder
from rl_lab.components.memories import GRUMemory
from rl_lab.components.normalizers import ObservationNormalizer
from rl_lab.components.spaces import SpecLike, action_spec
from rl_lab.metrics.values import Metrics
from rl_lab.records import Batch, BatchSpec, Observation, RolloutBatch
from rl_lab.specs import ActionSpec


class BCPolicy(LearningController):
    """Normalised observations → encoder → (memory) → MLP → head.

    Vectors are brought to zero mean and unit deviation by the dataset's own statistics, or, where the batches come from
    a growing replay, by running ones; they are saved with the policy. With `memory` units above 0 a GRU remembers
    `sequence_length` decisions, in training and when it acts; then it starts again from zeros.
    """

    fitted: Tensor  # whether the statistics are those of a dataset

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        action: ActionSpec | Mapping[str, Any],
        head: str = "auto",  # auto | categorical | deterministic | gaussian | gmm
        modes: int = 5,  # of a mixture
        min_std: float | None = None,  # of gaussian and gmm; null: the head's own
        units: int = 256,
        layers: int = 2,
        normalize: bool = True,
        memory: int = 0,  # units of a GRU; 0: none
        sequence_length: int = 1,  # records of one sequence
        batch_size: int = 256,  # of its own batches, where the workflow has none
        image_encoder: str = "nature",
        depth: int = 32,  # of the image encoder
    ) -> None:
        super().__init__()
        self.sequence_length, self.batch_size = sequence_length, batch_size
        self.normalizer = ObservationNormalizer(observation=observation, clip=10.0) if normalize else None
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.encoder = MultiKeyEncoder(
            observation=observation, layers=0, depth=depth, image_encoder=image_encoder, use_symlog=False
        )
        size = self.encoder.output_size
        self.memory = GRUMemory(input_size=size, units=memory) if memory else None
        self.head = make_head(head, action_spec(action), modes=modes, min_std=min_std)
        self.mlp = _mlp(memory or size, self.head.outputs, units=units, layers=layers)

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        if self.memory is None:
            return {}
        device = self.fitted.device
        return {"memory": self.memory.initial(num_envs), "age": torch.zeros(num_envs, dtype=torch.int64, device=device)}

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        device = self.fitted.device
        features = self._encode({key: torch.as_tensor(value, device=device) for key, value in observation.items()})
        if self.memory is not None:
            goes_on = (state["age"] % self.sequence_length > 0).to(features.dtype).unsqueeze(-1)
            features = self.memory.step(features, state["memory"] * goes_on)
            state = {"memory": features, "age": state["age"] + 1}
        return self.head.choose(self.mlp(features), mode).cpu().numpy(), state

    def _encode(self, observation: Mapping[str, Tensor]) -> Float[Tensor, "*lead features"]:
        return self.encoder(observation if self.normalizer is None else self.normalizer(observation))

    # Learning ---------------------------------------------------------------------------------------------------------

    def batch_spec(self, device: str) -> BatchSpec:
        return BatchSpec(self.batch_size, self.sequence_length, device=device)

    def use_statistics(self, statistics: Mapping[str, Any]) -> None:
        if self.normalizer is None or bool(self.fitted):
            return
        self.normalizer.fit(statistics)
        self.fitted.fill_(True)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The head's loss, averaged over the decisions of the batch: an episode's last record has no action."""
        observation, action, is_first, valid = _sequences(batch)
        if self.normalizer is not None and not self.fitted:
            self.normalizer.update(observation)
        features = self._encode(observation)
        if self.memory is not None:
            time_first = features.transpose(0, 1)
            states = self.memory.scan(time_first, self.memory.initial(len(features)), is_first.transpose(0, 1))
            features = states.transpose(0, 1)
        weight = valid.float()
        losses = self.head.loss(self.mlp(features), action)
        return (weight * losses).sum() / weight.sum().clamp(min=1.0), {}


def _sequences(batch: Batch) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Observations, actions, `is_first` and which records are decisions, each [batch, time, ...]."""
    if not isinstance(batch, RolloutBatch):
        return batch.observation, batch.action, batch.is_first, ~batch.is_last
    rows = batch.indices
    observation = {key: value.flatten(0, 1)[rows] for key, value in batch.observation.items()}
    first = batch.rollout.is_first.flatten(0, 1)[rows]
    return observation, batch.action.flatten(0, 1)[rows], first, torch.ones_like(first)


def _mlp(inputs: int, outputs: int, *, units: int, layers: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(inputs, units), nn.ReLU()]
        inputs = units
    return nn.Sequential(*modules, nn.Linear(inputs, outputs))

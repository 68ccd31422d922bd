"""Q-learning with a slow copy of the network: the smallest algorithm that uses every part of a workflow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import Metrics
from rl_lab.nn.distributions import one_hot
from rl_lab.nn.optimizers import LaProp
from rl_lab.records import BatchSpec, Observation, SequenceBatch
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext


class TinyQ(Workflow):
    """Q(o, a) of one discrete action; explores by chance."""

    name = "tiny_q"
    update_hooks = ("update",)  # the hooks that take a batch; `training.phases` may name them

    def __init__(self, *, batch_size: int = 32, discount: float = 0.99, epsilon: float = 0.1) -> None:
        self.batch_size, self.discount, self.epsilon = batch_size, discount, epsilon

    def _bind_context(self, context: WorkflowContext) -> None:
        if len(context.action_spec.classes) != 1:
            raise ConfigError(f"tiny_q needs one discrete action; this environment has {context.action_spec}.")
        self.encoder = context.component("encoder", nn.Module)
        self.head = context.controller("q", nn.Module)
        self.slow = context.controller("slow_q", SlowTarget)
        self.optimizer = context.optimizer("main", LaProp) if context.optimizers else None  # none where it only acts
        self.codec = ActionCodec(context.action_spec)

    # Acting -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        tensors = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        values = self.head(self.encoder(tensors))
        if mode == "train":  # torch's own random stream is saved with the run
            explores = torch.rand(len(values), 1, device=values.device) < self.epsilon
            values = torch.where(explores, torch.rand_like(values), values)
        action = one_hot(values.argmax(-1), values.shape[-1])
        return self.codec.decode(action).cpu().numpy(), state

    # Learning ---------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, sequence_length=2, device=str(self.context.device))

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        assert self.optimizer is not None
        loss = self.batch_losses(batch)["q"]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step(loss=loss)
        self.slow.update(self.head)
        return {"loss/q": loss.detach()}

    def batch_losses(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """Records 0 and 1 follow each other: the action of 0 led to the observation and the reward of 1."""
        features = self.encoder(batch.observation)
        value = (self.head(features[:, 0]) * self.codec.encode(batch.action[:, 0])).sum(-1)
        with torch.no_grad():
            following = self.slow(features[:, 1]).amax(-1)
            live = self.discount * (1.0 - batch.is_terminal[:, 1].float())
            target = batch.reward[:, 1] + live * following
            within = 1.0 - batch.is_last[:, 0].float()  # after a last record another episode begins
        return {"q": (within * (value - target).square()).mean()}

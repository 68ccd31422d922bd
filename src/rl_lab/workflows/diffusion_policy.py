"""Diffusion Policy: a policy learns to denoise the data's chunks of actions. Rollouts only evaluate it."""

from __future__ import annotations

from typing import ClassVar

from torch.optim import Optimizer

from rl_lab.components.actors.diffusion_policy import DiffusionPolicy
from rl_lab.metrics.values import Metrics
from rl_lab.nn.optimizers import scale_learning_rate, warmup_cosine
from rl_lab.records import Batch, Illustration, SequenceBatch
from rl_lab.workflows.bc import BehaviourCloning
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.diffusion_pictures import chunk_pictures


class DiffusionPolicyWorkflow(BehaviourCloning):
    """Behaviour cloning with the loss of a diffusion model (see `rl_lab.components.actors.diffusion_policy`):

        chunk, observations ~ windows of the data       k ~ uniform levels       ε ~ N(0, 1)
        L = E |ε - ε_θ(√ᾱ_k·chunk + √(1 - ᾱ_k)·ε, k, observations)|²

    The learning rate rises over `warmup` updates and falls to 0 as a cosine until `decay_updates`. After each step of
    the optimiser the averaged weights follow; they are what acts.
    """

    name: ClassVar[str] = "diffusion_policy"

    def __init__(self, *, batch_size: int, warmup: int, decay_updates: int) -> None:
        super().__init__(batch_size=batch_size)
        self.warmup, self.decay_updates = warmup, decay_updates

    def _bind_context(self, context: WorkflowContext) -> None:
        self.policy: DiffusionPolicy = context.controller("policy", DiffusionPolicy)

    def update(self, batch: Batch, *, phase: PhaseView) -> Metrics:
        """One gradient step on the policy's loss, and the average of the weights."""
        share = warmup_cosine(int(self.policy.average.updates), warmup=self.warmup, total=self.decay_updates)
        scale_learning_rate(self.context.optimizer("policy", Optimizer), share)
        return super().update(batch, phase=phase)

    def illustrate(self, batch: SequenceBatch) -> list[Illustration]:
        """Chunks on their way from noise to actions, and what was drawn along an episode."""
        return chunk_pictures(self.policy, batch)

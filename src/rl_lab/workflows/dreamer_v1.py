"""Dreamer (Hafner et al., 2020): behaviours learned by latent imagination.

A Gaussian world model learns from replayed sequences. The value of a dream is differentiated through the model itself:
the actor follows the gradient of the dreamed returns by its own actions. There is no target network, no entropy bonus
and no baseline. What the Dreamers share is in `dreamer.py`, how actor and critic learn in dreams in
`components/behaviours/actor_critic.py`; here is what makes it the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_lab.components.behaviours import BehaviourRules
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.workflows.base import Mode
from rl_lab.workflows.dreamer import Dreamer, Losses


class DreamerV1(Dreamer):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v1"
    default_scales: ClassVar[dict[str, float]] = {
        "observation": 1.0, "reward": 1.0, "continue": 10.0, "divergence": 1.0, "policy": 1.0, "value": 1.0,
    }  # fmt: skip

    def __init__(
        self,
        *,
        batch_size: int = 50,
        sequence_length: int = 50,
        train_ratio: float = 500.0,
        stored_latents: bool = False,
        horizon: int = 15,
        lambda_: float = 0.95,
        discount: float = 0.99,
        free_nats: float = 3.0,
        exploration: float = 0.3,
        loss_scales: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, discount=discount, loss_scales=loss_scales,
        )  # fmt: skip
        if exploration < 0.0:
            raise ConfigError(f"exploration={exploration}: expected 0 or more.")
        self.horizon, self.lambda_, self.free_nats, self.exploration = horizon, lambda_, free_nats, exploration

    def divergence_losses(self, posterior: Any, prior: Any) -> tuple[Losses, Tensor]:
        """One KL for both. The free nats are those of the mean over the batch, not of each step."""
        divergence = self.rssm.divergence(posterior, prior)
        return {"divergence": divergence.mean().clamp_min(self.free_nats)}, divergence

    def behaviour_rules(self) -> BehaviourRules:
        """The gradient of the returns through the dream for the actor, plain regression for the critic.

        A dream is judged from its first imagined state on. One that starts where an episode ended does not count: in
        the original such a record is the last of its sequence, and left out.
        """
        return BehaviourRules(
            horizon=self.horizon, lambda_=self.lambda_, timing="departure", drop_start=True, root="undiscounted",
            gradient="dynamics", dynamics_objective="return", target_critic="fast", entropy_scale=0.0,
            slow_value_scale=0.0,
        )  # fmt: skip

    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Tensor:
        """Noise on top of the sample while training; the likeliest action in an evaluation."""
        action = super()._choose_action(latent, mode=mode)
        return action if mode == "eval" else self._explore(action)

    def _explore(self, action: Tensor) -> Tensor:
        """Continuous actions: N(0, exploration), cut off at ±1. Discrete ones: a random one with that probability."""
        if self.context.action_spec.kind == "continuous":
            return (action + self.exploration * torch.randn_like(action)).clamp(-1.0, 1.0)
        uniform = self.actor.distribution(torch.zeros_like(action)).sample()
        chosen = torch.rand(action.shape[0], 1, device=action.device) < self.exploration
        return torch.where(chosen, uniform, action)

"""DreamerV2 (Hafner et al., 2021): mastering Atari with discrete world models.

The latents are categorical, with straight-through gradients, and the KL is balanced: the prior learns faster than the
posterior. The actor learns by REINFORCE for discrete actions, through the dynamics for continuous ones, or by both; a
target critic, copied every so many updates, stands in the returns. What the Dreamers share is in `dreamer.py`, how
actor and critic learn in dreams in `components/behaviours/actor_critic.py`; here is what makes it the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl_lab.components.behaviours import BehaviourRules
from rl_lab.errors import ConfigError
from rl_lab.workflows.dreamer import Dreamer, GradientChoice, Losses


class DreamerV2(Dreamer):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v2"
    default_scales: ClassVar[dict[str, float]] = {
        "observation": 1.0, "reward": 1.0, "continue": 1.0, "policy": 1.0, "value": 1.0,
    }  # fmt: skip

    def __init__(
        self,
        *,
        batch_size: int = 16,
        sequence_length: int = 50,
        train_ratio: float = 160.0,
        stored_latents: bool = False,
        horizon: int = 15,
        lambda_: float = 0.95,
        discount: float = 0.99,
        free_nats: float = 0.0,
        kl_scale: float = 1.0,
        kl_balance: float = 0.8,
        actor_gradient: GradientChoice = "auto",
        dynamics_share: float = 0.1,
        entropy_scale: float = 2e-3,
        loss_scales: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, discount=discount, loss_scales=loss_scales,
        )  # fmt: skip
        if not 0.0 <= kl_balance <= 1.0:
            raise ConfigError(f"kl_balance={kl_balance}: expected a number from 0 to 1, the prior's share.")
        self.loss_scales |= {"dynamics": kl_scale * kl_balance, "representation": kl_scale * (1.0 - kl_balance)}
        self.horizon, self.lambda_, self.free_nats = horizon, lambda_, free_nats
        self.actor_gradient, self.dynamics_share, self.entropy_scale = actor_gradient, dynamics_share, entropy_scale

    def divergence_losses(self, posterior: Any, prior: Any) -> tuple[Losses, Tensor]:
        """KL balancing: the larger share moves the prior. The free nats are those of the mean over the batch."""
        dynamics = self.rssm.divergence(posterior.detach(), prior)
        representation = self.rssm.divergence(posterior, prior.detach())
        losses = {
            "dynamics": dynamics.mean().clamp_min(self.free_nats),
            "representation": representation.mean().clamp_min(self.free_nats),
        }
        return losses, dynamics

    def behaviour_rules(self) -> BehaviourRules:
        """An entropy bonus, a target critic in returns and baselines; the dream's first state by the data."""
        return BehaviourRules(
            horizon=self.horizon, lambda_=self.lambda_, timing="departure", root="discounted",
            gradient=self._gradient(self.actor_gradient), dynamics_share=self.dynamics_share,
            dynamics_objective="return", target_critic="slow", entropy_scale=self.entropy_scale, slow_value_scale=0.0,
        )  # fmt: skip

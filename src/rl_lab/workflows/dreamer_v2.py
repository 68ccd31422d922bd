"""DreamerV2 (Hafner et al., 2021): mastering Atari with discrete world models.

The latents are categorical, with straight-through gradients, and the KL is balanced: the prior learns faster than the
posterior. The actor learns by REINFORCE for discrete actions, through the dynamics for continuous ones, or by both; the
values in its returns are those of a target critic, a copy that is renewed at intervals (`slow_every`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.losses.returns import (
    actor_loss,
    cumulative_discounts_before,
    masked_discount,
    mean_kl_with_free_nats,
    recursive_returns,
    reinforce_objective,
    weighted_mean,
    with_first,
)
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer import Behaviour, Dreamer, GradientChoice
from rl_lab.workflows.world_model import Filtered, Losses, Replayed


class DreamerV2(Dreamer):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v2"
    loss_names: ClassVar[tuple[str, ...]] = (
        "observation", "reward", "continue", "dynamics", "representation", "policy", "value",
    )  # fmt: skip
    target_critic = "slow"
    value_includes_reward = True

    def __init__(
        self,
        *,
        batch_size: int,
        sequence_length: int,
        train_ratio: float,
        stored_latents: bool,
        horizon: int,
        lambda_: float,
        discount: float,
        free_nats: float,
        kl_scale: float,
        kl_balance: float,
        actor_gradient: GradientChoice,
        dynamics_share: float,
        entropy_scale: float,
        model_first: bool,
        loss_scales: Mapping[str, float],
    ) -> None:
        if not 0.0 <= kl_balance <= 1.0:
            raise ConfigError(f"kl_balance={kl_balance}: expected a number from 0 to 1, the prior's share.")
        balanced = {"dynamics": kl_scale * kl_balance, "representation": kl_scale * (1.0 - kl_balance)}
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, horizon=horizon, lambda_=lambda_, free_nats=free_nats,
            model_first=model_first, loss_scales=balanced | dict(loss_scales),
        )  # fmt: skip
        self.discount, self.actor_gradient = discount, actor_gradient
        self.dynamics_share, self.entropy_scale = dynamics_share, entropy_scale

    def _bind_context(self, context: WorkflowContext) -> None:
        self.gradient = self._gradient(self.actor_gradient)
        super()._bind_context(context)

    def world_model_losses(self, filtered: Filtered, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        """-ln p(o|s) - ln p(r|s) - ln p(c|s) + α·KL(sg(q)‖p) + (1 - α)·KL(q‖sg(p)), free nats of each KL's mean."""
        losses, metrics = self.prediction_losses(filtered, data)
        posterior, prior = self.posterior_and_prior(filtered)
        kl = self.rssm.divergence(posterior.detach(), prior)
        losses["dynamics"] = mean_kl_with_free_nats(kl, self.free_nats)
        losses["representation"] = mean_kl_with_free_nats(
            self.rssm.divergence(posterior, prior.detach()), self.free_nats
        )
        return losses, metrics | self.latent_metrics(posterior, prior, kl)

    def behaviour_losses(self, states: LatentState, data: Replayed) -> Behaviour:
        """Actor: -w_t·(ρ·ln π(a_t|s_t)·sg(V_{t+1} - v(s_t)) + (1 - ρ)·V_{t+1} + η·H[π(·|s_t)]), t = 0 … H - 2.

        V_t = r_t + γ_t·((1 - λ)·v(s_{t+1}) + λ·V_{t+1}), with the target critic's values v: the return of state t
        begins with its own reward, so action t is credited with V_{t+1}. The critic regresses V_t, t = 0 … H - 1.
        """
        dream = self.dream(self.rssm.starts(states))
        logits = self.value_logits(dream.features.detach())
        with self.imagining():
            r, γ, v, _ = self.predictions(dream.features, logits.detach())
            γ = with_first(γ, masked_discount(data.is_terminal.flatten(), self.discount))
            returns = recursive_returns(r[:-1], γ[:-1], v[1:], self.lambda_, v[-1], dim=0)
        w = cumulative_discounts_before(γ)[:-1]
        policy = self.actor.distribution(self.policy_params(dream.features[:-2].detach()))
        advantage = returns[1:] - v[:-2]
        objective = returns[1:]
        if self.gradient != "dynamics":
            objective = reinforce_objective(policy.log_prob(dream.actions[:-1].detach()), advantage)
        if self.gradient == "mixed":
            objective = (1.0 - self.dynamics_share) * objective + self.dynamics_share * returns[1:]
        entropy = policy.entropy()
        losses = {
            "policy": actor_loss(objective, w[:-1], entropy=entropy, entropy_scale=self.entropy_scale),
            "value": weighted_mean(self.critic.loss(logits[:-1], returns.detach()), w),
        }
        metrics = {"dream/reward": r, "dream/continue": γ, "dream/value": v, "dream/return": returns}
        metrics |= {"policy/entropy": entropy, "policy/advantage_size": advantage.abs()}
        return Behaviour(losses, returns[0].detach(), None, {name: x.detach().mean() for name, x in metrics.items()})

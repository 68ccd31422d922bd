"""Dreamer (Hafner et al., 2020): behaviours learned by latent imagination.

A Gaussian world model learns from replayed sequences. The actor follows the gradient of the imagined returns by its own
actions, through the model. There is no target network, no entropy bonus and no baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rl_lab.components.world_models.base import LatentState
from rl_lab.errors import ConfigError
from rl_lab.losses.returns import (
    actor_loss,
    cumulative_discounts_before,
    mean_kl_with_free_nats,
    recursive_returns,
    weighted_mean,
    with_first,
)
from rl_lab.workflows.base import Mode
from rl_lab.workflows.dreamer import Behaviour, Dreamer
from rl_lab.workflows.world_model import Filtered, Losses, Replayed


class DreamerV1(Dreamer):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v1"
    loss_names: ClassVar[tuple[str, ...]] = ("observation", "reward", "continue", "divergence", "policy", "value")
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
        exploration: float,
        loss_scales: Mapping[str, float],
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, horizon=horizon, lambda_=lambda_, free_nats=free_nats, model_first=False,
            loss_scales=loss_scales,
        )  # fmt: skip
        if exploration < 0.0:
            raise ConfigError(f"exploration={exploration}: expected 0 or more.")
        self.discount, self.exploration = discount, exploration

    def world_model_losses(self, filtered: Filtered, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        """-ln p(o|s) - ln p(r|s) - ln p(c|s) + max(E[KL(q‖p)], free): free nats of the batch's mean, not of a step."""
        losses, metrics = self.prediction_losses(filtered, data)
        posterior, prior = self.posterior_and_prior(filtered)
        kl = self.rssm.divergence(posterior, prior)
        losses["divergence"] = mean_kl_with_free_nats(kl, self.free_nats)
        return losses, metrics | self.latent_metrics(posterior, prior, kl)

    def behaviour_losses(self, states: LatentState, data: Replayed) -> Behaviour:
        """Actor: max E[Σ w_t V_λ(s_t)] through the dynamics. Critic: min E[Σ w_t (v(s_t) - sg(V_λ(s_t)))² / 2].

        V_λ(s_t) = r_t + γ_t·((1 - λ)·v(s_{t+1}) + λ·V_λ(s_{t+1})), from the first imagined state on: t = 1 … H - 1. A
        dream that starts where an episode ended has no weight: the original leaves such a record out.
        """
        dream = self.dream(self.rssm.starts(states))
        logits = self.value_logits(dream.features.detach())
        with self.imagining():
            r, γ, v, _ = self.predictions(dream.features, logits.detach())
            γ = with_first(γ, 1.0 - data.is_terminal.flatten().float())
            returns = recursive_returns(r[:-1], γ[:-1], v[1:], self.lambda_, v[-1], dim=0)[1:]
        w = cumulative_discounts_before(γ)[1:-1]
        losses = {
            "policy": actor_loss(returns, w),
            "value": weighted_mean(self.critic.loss(logits[1:-1], returns.detach()), w),
        }
        metrics = {"dream/reward": r, "dream/continue": γ, "dream/value": v, "dream/return": returns}
        return Behaviour(losses, returns[0].detach(), None, {name: x.detach().mean() for name, x in metrics.items()})

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

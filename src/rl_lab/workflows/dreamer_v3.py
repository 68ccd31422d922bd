"""DreamerV3 (Hafner et al., 2023): one world model, one loss, one set of settings for every task.

The packaged settings are the present form of the algorithm; its first form, of 2023, is a choice of settings (see
`docs/dreamer_v3.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from rl_lab.components.critics.dreamer import ReturnNormalizer
from rl_lab.components.predictors import ContinuePredictor
from rl_lab.components.world_models.base import LatentState
from rl_lab.losses.returns import (
    actor_loss,
    cumulative_discounts,
    lambda_returns,
    masked_discount,
    reinforce_objective,
    step_kl_with_free_nats,
    weighted_mean,
    with_first,
)
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer import Behaviour, Dreamer, GradientChoice
from rl_lab.workflows.world_model import Filtered, Losses, Replayed


class DreamerV3(Dreamer):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v3"
    data_parallel = True
    loss_names: ClassVar[tuple[str, ...]] = (
        "observation", "reward", "continue", "dynamics", "representation", "policy", "value", "replay_value",
    )  # fmt: skip

    def __init__(
        self,
        *,
        batch_size: int,
        sequence_length: int,
        train_ratio: float,
        stored_latents: bool,
        horizon: int,
        lambda_: float,
        free_nats: float,
        actor_gradient: GradientChoice,
        first_discount: Literal["predicted", "data"],
        entropy_scale: float,
        slow_value_scale: float,
        sample_in_eval: bool,
        model_first: bool,
        loss_scales: Mapping[str, float],
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, horizon=horizon, lambda_=lambda_, free_nats=free_nats,
            model_first=model_first, loss_scales=loss_scales,
        )  # fmt: skip
        self.actor_gradient, self.first_discount = actor_gradient, first_discount
        self.entropy_scale, self.slow_value_scale = entropy_scale, slow_value_scale
        self.sample_in_eval = sample_in_eval

    @property
    def needs_slow_critic(self) -> bool:
        return self.slow_value_scale > 0.0

    def _bind_context(self, context: WorkflowContext) -> None:
        self.gradient = self._gradient(self.actor_gradient)
        context.component("continue", ContinuePredictor)  # it holds the discount
        self.return_normalizer = context.component("return_normalizer", ReturnNormalizer)
        super()._bind_context(context)

    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Tensor:
        return super()._choose_action(latent, mode="train" if self.sample_in_eval else mode)

    def world_model_losses(self, filtered: Filtered, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        """-ln p(o|s) - ln p(r|s) - ln p(c|s) + β_dyn·max(1, KL(sg(q)‖p)) + β_rep·max(1, KL(q‖sg(p))), of each step."""
        losses, metrics = self.prediction_losses(filtered, data)
        posterior, prior = self.posterior_and_prior(filtered)
        kl = self.rssm.divergence(posterior.detach(), prior)
        losses["dynamics"] = step_kl_with_free_nats(kl, self.free_nats)
        losses["representation"] = step_kl_with_free_nats(
            self.rssm.divergence(posterior, prior.detach()), self.free_nats
        )
        return losses, metrics | self.latent_metrics(posterior, prior, kl)

    def behaviour_losses(self, states: LatentState, data: Replayed) -> Behaviour:
        """Actor: -w_t·(ln π(a_t|s_t)·sg((R_t - v(s_t)) / S) + η·H[π(·|s_t)]). Critic: -w_t·ln p(sg(R_t) | s_t), and
        towards its slow copy. t = 0 … H - 1.

        R_t = r_{t+1} + γ_{t+1}·((1 - λ)·v(s_{t+1}) + λ·R_{t+1});  S is the spread of returns, at least 1.
        """
        dream = self.dream(self.rssm.starts(states))
        logits = self.value_logits(dream.features.detach())
        with self.imagining():
            r, γ, v, slow_v = self.predictions(dream.features, logits.detach())
            if self.first_discount == "data":
                γ = with_first(γ, 1.0 - data.is_terminal.flatten().float())
            returns = lambda_returns(r, γ, v, self.lambda_, dim=0)
            scale = self.return_normalizer(returns.detach())
            advantage = (returns - v[:-1]) / scale
        w = cumulative_discounts(γ)[:-1]
        policy = self.actor.distribution(self.policy_params(dream.features[:-1].detach()))
        objective = advantage
        if self.gradient == "reinforce":
            objective = reinforce_objective(policy.log_prob(dream.actions.detach()), advantage)
        entropy = policy.entropy()
        losses = {
            "policy": actor_loss(objective, w, entropy=entropy, entropy_scale=self.entropy_scale),
            "value": weighted_mean(self.value_loss(logits[:-1], returns, None if slow_v is None else slow_v[:-1]), w),
        }
        metrics = {"dream/reward": r, "dream/continue": γ, "dream/value": v, "dream/return": returns}
        metrics |= {"dream/return_scale": scale, "policy/entropy": entropy, "policy/advantage_size": advantage.abs()}
        return Behaviour(
            losses, returns[0].detach(), None if slow_v is None else slow_v[0].detach(),
            {name: x.detach().mean() for name, x in metrics.items()},
        )  # fmt: skip

    def value_loss(self, logits: Tensor, returns: Tensor, slow_value: Tensor | None) -> Tensor:
        """-ln p(return), and towards the slow critic's own prediction. Neither target has a gradient."""
        if slow_value is None:
            return self.critic.loss(logits, returns.detach())
        loss, distance = self.critic.losses(logits, returns.detach(), slow_value.detach())
        return loss + self.slow_value_scale * distance

    def replay_losses(self, states: LatentState, data: Replayed, behaviour: Behaviour) -> Losses:
        """The critic on the replayed sequence itself; its gradient does reach the world model.

        Rewards are the real ones; where the sequence or an episode stops, the imagined return of that state takes over.
        """
        if self.loss_scales["replay_value"] <= 0.0:
            return {}
        lead = data.reward.shape
        γ = masked_discount(data.is_terminal, self.discount)
        λ = self.lambda_ * (1.0 - data.is_last.float())
        targets = lambda_returns(data.reward, γ, behaviour.returns.view(lead), λ, dim=1)
        slow_value = None if behaviour.slow_value is None else behaviour.slow_value.view(lead)[:, :-1]
        logits = self.value_logits(states.map(lambda part: part[:, :-1]).features)
        w = 1.0 - data.is_last[:, :-1].float()
        return {"replay_value": weighted_mean(self.value_loss(logits, targets, slow_value), w)}

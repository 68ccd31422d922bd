"""DreamerV3 (Hafner et al., 2023): one world model, one loss, one set of settings for every task.

The defaults are the current form of the algorithm; the paper's first form of 2023 is a choice of settings (see
`docs/dreamer_v3.md`). What the Dreamers share is in `dreamer.py`, how actor and critic learn in dreams in
`components/behaviours/actor_critic.py`; here is what makes it the third.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl_lab.components.behaviours import BehaviourRules, Learned
from rl_lab.components.behaviours.actor_critic import Root
from rl_lab.components.predictors import ContinuePredictor
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.components.return_computers import lambda_returns
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer import Dreamer, GradientChoice, Losses
from rl_lab.workflows.latent import Replayed


class DreamerV3(Dreamer):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v3"
    pieces = ("_encode", "_prediction_losses", "_replayed_value_loss")
    default_scales: ClassVar[dict[str, float]] = {
        "observation": 1.0, "reward": 1.0, "continue": 1.0, "dynamics": 1.0, "representation": 0.1,
        "policy": 1.0, "value": 1.0, "replay_value": 0.3,
    }  # fmt: skip

    def __init__(
        self,
        *,
        batch_size: int = 16,
        sequence_length: int = 64,
        train_ratio: float = 512.0,
        stored_latents: bool = True,
        horizon: int = 15,
        lambda_: float = 0.95,
        free_nats: float = 1.0,
        actor_gradient: GradientChoice = "reinforce",
        root: Root = "predicted",
        entropy_scale: float = 3e-4,
        slow_value_scale: float = 1.0,
        sample_in_eval: bool = False,  # as the published scores were made
        loss_scales: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents, discount=1.0 - 1.0 / 333.0, loss_scales=loss_scales,
        )  # fmt: skip
        self.horizon, self.lambda_, self.free_nats = horizon, lambda_, free_nats
        self.actor_gradient, self.root = actor_gradient, root
        self.entropy_scale, self.slow_value_scale = entropy_scale, slow_value_scale
        self.sample_in_eval = sample_in_eval

    def _bind_context(self, context: WorkflowContext) -> None:
        context.component("continue", ContinuePredictor)  # it holds the discount
        super()._bind_context(context)

    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Tensor:
        return super()._choose_action(latent, mode="train" if self.sample_in_eval else mode)

    def divergence_losses(self, posterior: Any, prior: Any) -> tuple[Losses, Tensor]:
        """The prior learns more than the posterior. One free nat for each step, not for their mean."""
        dynamics = self.rssm.divergence(posterior.detach(), prior)
        representation = self.rssm.divergence(posterior, prior.detach())
        losses = {
            "dynamics": dynamics.clamp_min(self.free_nats).mean(),
            "representation": representation.clamp_min(self.free_nats).mean(),
        }
        return losses, dynamics

    def behaviour_rules(self) -> BehaviourRules:
        """REINFORCE with normalised advantages for the actor, two-hot regression for the critic."""
        return BehaviourRules(
            horizon=self.horizon, lambda_=self.lambda_, timing="arrival", root=self.root,
            gradient=self._gradient(self.actor_gradient), dynamics_objective="advantage", target_critic="fast",
            entropy_scale=self.entropy_scale, slow_value_scale=self.slow_value_scale,
        )  # fmt: skip

    @property
    def learns_from_returns(self) -> bool:
        return self.loss_scales["replay_value"] > 0.0

    def return_losses(self, states: LatentState, data: Replayed, learned: Learned) -> Losses:
        if not self.learns_from_returns:
            return {}
        return {"replay_value": self.replay_value_loss(states, data, learned.returns, learned.slow_value)}

    def replay_value_loss(
        self, states: LatentState, data: Replayed, returns: Tensor, slow_value: Tensor | None
    ) -> Tensor:
        """The critic on the replayed sequence itself; its gradient does reach the world model.

        Rewards are the real ones; where the sequence or an episode stops, the dreamed return of that state takes over.
        """
        lead = data.reward.shape
        live = (1.0 - data.is_terminal.float()) * self.discount
        mixing = (1.0 - data.is_last.float()) * self.lambda_
        targets = lambda_returns(data.reward, live, returns.view(lead), mixing, dim=1)
        alive = 1.0 - data.is_last[:, :-1].float()
        slow_value = None if slow_value is None else slow_value.view(lead)[:, :-1]
        output = self.behaviour.evaluate_critic(states.map(lambda part: part[:, :-1]).features)
        return self._replayed_value_loss(output, targets, slow_value, alive)

    def _replayed_value_loss(self, output: Tensor, targets: Tensor, slow_value: Tensor | None, alive: Tensor) -> Tensor:
        return (alive * self.behaviour.value_loss(output, targets, slow_value)).mean()

"""TD-MPC2 (Hansen, Su & Wang, 2024): a latent world model without a decoder, planned in at every decision.

The model is learned to be self-consistent: what the dynamics predict must be what the encoder makes of the next
observation, and reward and value must be readable from it. Reward and values are two-hot regressions in symlog space,
latents are points of simplices, and a policy that maximises the values proposes actions to the planner and to the
targets. Episodes may end (a termination head and masked targets) and actions may be discrete.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.normalizers import RunningScale
from rl_lab.records import SequenceBatch
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.latent_planning import LatentPlanning, Losses, RolledOut, Window

LOSS_SCALES = {"consistency": 20.0, "reward": 0.1, "value": 0.1, "termination": 1.0}


class TDMPC2(LatentPlanning):
    """Methods appear in the order of one update."""

    name = "tdmpc2"
    pair = "mean"
    compiled = ("_targets", "_model_losses")

    def __init__(
        self,
        *,
        batch_size: int = 256,
        horizon: int = 3,  # transitions of a window; the planner has its own
        rho: float = 0.5,  # a step counts this much less than the one before it
        entropy_scale: float = 1e-4,
        loss_scales: Mapping[str, float] | None = None,
        act_with: str = "planner",  # or policy
        class_noise: float = 0.05,  # share of random discrete actions while training
    ) -> None:
        super().__init__(batch_size=batch_size, horizon=horizon, act_with=act_with, class_noise=class_noise)
        if not 0.0 < rho <= 1.0:
            raise ConfigError(f"rho={rho}: expected more than 0 and at most 1.")
        for name in loss_scales or {}:
            if name not in LOSS_SCALES:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, LOSS_SCALES)}")
        self.rho, self.entropy_scale = rho, entropy_scale
        self.loss_scales = LOSS_SCALES | dict(loss_scales or {})

    def _bind_context(self, context: WorkflowContext) -> None:
        self.value_scale = context.component("value_scale", RunningScale)
        super()._bind_context(context)
        self.step_weight = self._powers(self.rho, self.horizon + 1)

    # One update -------------------------------------------------------------------------------------------------------

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window = self._window(inputs)
        with self.context.autocast():
            losses, latents, metrics = self.model_losses(window)
            total = torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()
        self._optimize(self.model_optimizer, total)
        # The policy sees the latents of before that step, and the values of after it.
        with self.context.autocast():
            policy_loss, policy_metrics = self.policy_loss(latents.detach(), window.alive)
        self._optimize(self.policy_optimizer, policy_loss)
        self.q.update_slow()
        metrics |= policy_metrics | {f"loss/{name}": loss for name, loss in losses.items()}
        return self._packed(metrics | {"loss/total": total, "loss/policy": policy_loss})

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        window = self._window(self._inputs(batch))
        with self.context.autocast():
            losses, latents, _ = self.model_losses(window)
            return losses | {"policy": self.policy_loss(latents, window.alive, watch=False)[0]}

    # The world model --------------------------------------------------------------------------------------------------

    def model_losses(self, window: Window) -> tuple[Losses, Tensor, dict[str, Tensor]]:
        """Consistency, reward, value and termination, unscaled; the latents z_0 … z_H; values to watch."""
        window = window._replace(observation=self.encoder.augment(window.observation))
        horizon, batch = window.reward.shape
        with torch.no_grad():
            noise, pair = self.policy.draw_noise((horizon, batch)), self.q.draw_pair()
            following, target = self._targets(window.following, window.reward, window.terminal, noise, pair)
        rolled = self.roll_out(window)
        keep = self.q.draw_keep(self.q.members, horizon * batch)
        losses, value = self._model_losses(rolled, window, following, target, keep)
        metrics = {"q/value": value, "q/target": (window.valid * target).sum() / window.valid.sum().clamp(min=1.0)}
        return losses, rolled.latents, metrics

    def _targets(
        self, following: dict[str, Tensor], reward: Tensor, terminal: Tensor, noise: Tensor, pair: Tensor
    ) -> tuple[Float[Tensor, "horizon batch latent"], Float[Tensor, "horizon batch"]]:
        """z̄ = h(s'), and y = r + γ (1 - end) min of two target Qs at (z̄, a' ~ π): encoder and policy are the online
        ones, and z̄ comes from the true next observation."""
        latent = self.encoder(following).float()
        action = self.policy.sample(latent, noise)
        values = self.q.mean(self.q.target(latent.flatten(0, 1), action.flatten(0, 1), pair))
        bootstrap = values.amin(0).view_as(reward)
        return latent, reward + self.model.discount * (1.0 - terminal) * bootstrap

    def _model_losses(
        self, rolled: RolledOut, window: Window, following: Tensor, target: Tensor, keep: Tensor | None
    ) -> tuple[Losses, Tensor]:
        """Means over batch and steps; step k counts ρ^k. Also the mean value."""
        horizon, batch = window.reward.shape
        weight = window.valid * self.step_weight[:-1] / (horizon * batch)
        before, after = rolled.latents[:-1], rolled.latents[1:]
        outputs = self.q(before.flatten(0, 1), window.action.flatten(0, 1), keep=keep).unflatten(1, (horizon, batch))
        value_loss = self.q.loss(outputs, target.expand(self.q.members, -1, -1)).mean(0)
        losses = {
            "consistency": (weight * (after - following).square().mean(-1)).sum(),
            "reward": (weight * self.model.reward_loss(rolled.reward, window.reward)).sum(),
            "value": (weight * value_loss).sum(),
        }
        if self.model.episodic:
            logit = self.model.termination_logit(after)
            miss = F.binary_cross_entropy_with_logits(logit, window.terminal, reduction="none")
            losses["termination"] = (window.valid * miss).mean()
        return losses, self.q.mean(outputs.detach()).mean()

    # The policy -------------------------------------------------------------------------------------------------------

    def policy_loss(
        self, latents: Float[Tensor, "states batch latent"], alive: Tensor, *, watch: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """-(value / scale + entropy), where the values are frozen: the mean over z_0 … z_H, step k counts ρ^k.

        The scale follows the spread of the values at the windows' first states, unless `watch` is off.
        """
        value, entropy = self.policy_values(latents)
        if watch:
            first = value[0].detach()
            mean = (alive[0] * first).sum() / alive[0].sum().clamp(min=1.0)
            self.value_scale.update(torch.where(alive[0] > 0, first, mean))
        objective = self.value_scale(value) + self.entropy_scale * entropy
        loss = -(alive * self.step_weight * objective).mean()
        return loss, {"policy/entropy": entropy.mean(), "policy/value": value.mean(), "q/scale": self.value_scale.value}

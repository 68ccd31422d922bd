"""TD-MPC2 (Hansen, Su & Wang, 2024): a latent world model without a decoder, planned in at every decision.

The model is learned to be self-consistent: what the dynamics predict must be what the encoder makes of the next
observation, and reward and value must be readable from it. Reward and values are two-hot regressions in symlog space,
latents are points of simplices, and a policy that maximises the values proposes actions to the planner and to the
targets. Episodes may end (a termination head and masked targets) and actions may be discrete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab import ranks
from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.normalizers import RunningScale
from rl_lab.records import SequenceBatch
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.tdmpc_base import BEHAVIOUR, WORLD_MODEL, Losses, TDMPCBase
from rl_lab.workflows.tdmpc_window import RolledOut, Window


class TDMPC2(TDMPCBase):
    """Methods appear in the order of one update."""

    name = "tdmpc2"
    data_parallel = True
    q_reduction = "mean"
    loss_names: ClassVar[tuple[str, ...]] = ("consistency", "reward", "termination", "value")
    compiled = ("_targets", "world_model_losses", "_value_loss")

    def __init__(
        self,
        *,
        batch_size: int,
        horizon: int,  # transitions of a window; the planner has its own
        rho: float,  # a step counts this much less than the one before it
        entropy_scale: float,
        loss_scales: Mapping[str, float],  # of each of `loss_names`
        act_with: str,  # planner or policy
        class_noise: float,  # share of random discrete actions while training
    ) -> None:
        super().__init__(batch_size=batch_size, horizon=horizon, act_with=act_with, class_noise=class_noise)
        if not 0.0 < rho <= 1.0:
            raise ConfigError(f"rho={rho}: expected more than 0 and at most 1.")
        for name in loss_scales:
            if name not in self.loss_names:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, self.loss_names)}")
        self.rho, self.entropy_scale, self.loss_scales = rho, entropy_scale, dict(loss_scales)

    def _bind_context(self, context: WorkflowContext) -> None:
        self.value_scale = context.component("value_scale", RunningScale)
        super()._bind_context(context)
        self.step_weight = self._powers(self.rho, self.horizon + 1)

    # Updates ----------------------------------------------------------------------------------------------------------

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step on the losses of model and Qs; then one of the policy, at the latents of before that step and by the
        Qs of after it."""
        window = self._window(inputs)
        with self.context.autocast():
            losses, latents, metrics = self.model_losses(window)
            total = self._total(losses)
        self._optimize(self.model_optimizer, total)
        losses |= self._policy_step(latents.detach(), window, metrics)
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        return self._packed("update", metrics)

    def _world_model_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window = self._window(inputs)
        with self.context.autocast():
            with torch.no_grad():
                following = self._encode(window.following)
            losses = self.world_model_losses(self.roll_out(window), window, following)
            total = self._total(losses)
        self._optimize(self.model_optimizer, total, WORLD_MODEL)
        metrics = {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        return self._packed("update_world_model", metrics)

    def _controller_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window = self._window(inputs)
        with self.context.autocast():
            with torch.no_grad():
                _, target = self.targets(window)
                latents = self.roll_out(window).latents
            value_loss, metrics = self.value_loss(latents, window, target)
        self._optimize(self.model_optimizer, self._total({"value": value_loss}), BEHAVIOUR)
        losses = {"value": value_loss} | self._policy_step(latents, window, metrics)
        return self._packed("update_controller", metrics | {f"loss/{name}": loss for name, loss in losses.items()})

    def _policy_step(self, latents: Tensor, window: Window, metrics: dict[str, Tensor]) -> Losses:
        """One step of the policy, then one of the slow Qs; adds to the metrics."""
        with self.context.autocast():
            loss, further = self.policy_loss(latents, window.alive)
        self._optimize(self.policy_optimizer, loss)
        self.q.update_slow()
        metrics |= further
        return {"policy": loss}

    def _total(self, losses: Losses) -> Tensor:
        return torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        window = self._window(self._inputs(batch))
        with self.context.autocast():
            losses, latents, _ = self.model_losses(window)
            return losses | {"policy": self.policy_loss(latents, window.alive, watch=False)[0]}

    # The world model and the Qs ---------------------------------------------------------------------------------------

    def model_losses(self, window: Window) -> tuple[Losses, Tensor, dict[str, Tensor]]:
        """Consistency, reward, termination and value, unscaled; the latents z_0 … z_H; metrics."""
        with torch.no_grad():
            following, target = self.targets(window)
        rolled = self.roll_out(window)
        losses = self.world_model_losses(rolled, window, following)
        losses["value"], metrics = self.value_loss(rolled.latents, window, target)
        return losses, rolled.latents, metrics

    def targets(self, window: Window) -> tuple[Float[Tensor, "horizon batch latent"], Float[Tensor, "horizon batch"]]:
        """z̄ = h(s'), and y = r + γ (1 - end) min of two target Qs at (z̄, a' ~ π): encoder and policy are the online
        ones, and z̄ comes from the true next observation."""
        noise, members = self.policy.draw_noise(window.reward.shape), self.q.draw_pair()
        return self._targets(window.following, window.reward, window.terminal, noise, members)

    def _targets(
        self, following: dict[str, Tensor], reward: Tensor, terminal: Tensor, noise: Tensor, members: Tensor
    ) -> tuple[Tensor, Tensor]:
        latent = self.encoder(following).float()
        action = self.policy.sample(latent, noise)
        values = self.q.mean(self.q.target(latent.flatten(0, 1), action.flatten(0, 1), members))
        bootstrap = values.amin(0).view_as(reward)
        return latent, reward + self.model.discount * (1.0 - terminal) * bootstrap

    def world_model_losses(
        self, rolled: RolledOut, window: Window, following: Float[Tensor, "horizon batch latent"]
    ) -> Losses:
        """‖z_{k+1} - z̄_{k+1}‖², cross-entropy of rewards and of ends: means over batch and steps, step k by ρ^k."""
        weight = window.valid * self.step_weight[:-1] / window.reward.numel()
        after = rolled.latents[1:]
        losses = {
            "consistency": (weight * (after - following).square().mean(-1)).sum(),
            "reward": (weight * self.model.reward_loss(rolled.reward, window.reward)).sum(),
        }
        if self.model.episodic:
            logit = self.model.termination_logit(after)
            miss = F.binary_cross_entropy_with_logits(logit, window.terminal, reduction="none")
            losses["termination"] = (window.valid * miss).mean()
        return losses

    def value_loss(
        self, latents: Float[Tensor, "states batch latent"], window: Window, target: Float[Tensor, "horizon batch"]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of all Qs at (z_k, a_k) with the targets, likewise; and metrics."""
        keep = self.q.draw_keep(self.q.members, target.numel())
        loss, value = self._value_loss(latents, window, target, keep)
        mean_target = (window.valid * target).sum() / window.valid.sum().clamp(min=1.0)
        return loss, {"q/value": value, "q/target": mean_target}

    def _value_loss(
        self, latents: Tensor, window: Window, target: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight = window.valid * self.step_weight[:-1] / target.numel()
        outputs = self.q(latents[:-1].flatten(0, 1), window.action.flatten(0, 1), keep=keep)
        outputs = outputs.unflatten(1, target.shape)
        by_step = self.q.loss(outputs, target.expand(self.q.members, -1, -1)).mean(0)
        return (weight * by_step).sum(), self.q.mean(outputs.detach()).mean()

    # The policy -------------------------------------------------------------------------------------------------------

    def policy_loss(
        self, latents: Float[Tensor, "states batch latent"], alive: Tensor, *, watch: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """-(value / scale + entropy) by frozen Qs: the mean over z_0 … z_H, step k by ρ^k; and metrics.

        The scale follows the spread of the values at the windows' first states, unless `watch` is off.
        """
        value, entropy = self.policy_values(latents)
        if watch:
            first = value[0].detach()
            total, count = ranks.average(torch.stack([(alive[0] * first).sum(), alive[0].sum()]))
            self.value_scale.update(torch.where(alive[0] > 0, first, total / count.clamp(min=1.0 / ranks.count())))
        objective = self.value_scale(value) + self.entropy_scale * entropy
        loss = -(alive * self.step_weight * objective).mean()
        return loss, {"policy/entropy": entropy.mean(), "policy/value": value.mean(), "q/scale": self.value_scale.value}

"""TD-MPC (Hansen, Wang & Su, 2022): temporal difference learning and model predictive control in one latent space.

A deterministic latent model is learned to agree with a slow copy of its encoder, to predict rewards and two values, all
by squared errors on windows that prioritised replay chooses. A policy maximises the smaller value. Actions are planned,
over a horizon that grows and with a least deviation that shrinks in the first part of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.components.planners.tdmpc import TDMPCPlanner
from rl_lab.errors import ConfigError
from rl_lab.records import CollectResult, SequenceBatch
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import MetricsSink, PhaseView, WorkflowContext
from rl_lab.workflows.tdmpc_base import BEHAVIOUR, WORLD_MODEL, Losses, TDMPCBase
from rl_lab.workflows.tdmpc_window import RolledOut, Window

LARGEST_LOSS = 1e4  # of one window
LARGEST_PRIORITY = 1e4


class TDMPC(TDMPCBase):
    """Methods appear in the order: planning, the update, the world model, the policy."""

    name = "tdmpc"
    q_reduction = "min"
    compiled = ("_targets", "world_model_losses", "_value_loss")
    plans_are_of_one_length = False

    def __init__(
        self,
        *,
        batch_size: int,
        horizon: int,  # transitions of a window, and the planner's horizon in the end
        rho: float,  # a step counts this much less than the one before it
        consistency_scale: float,
        reward_scale: float,
        value_scale: float,
        termination_scale: float,
        entropy_scale: float,  # for discrete actions; the continuous policy has no entropy
        schedule_steps: int,  # env steps until horizon and deviation have reached their final values
        first_horizon: int,
        first_std: float,  # the planner's least deviation at first; its own min_std in the end
        priority_floor: float,
        act_with: str,  # planner or policy
        class_noise: float,  # share of random discrete actions while training
    ) -> None:
        super().__init__(batch_size=batch_size, horizon=horizon, act_with=act_with, class_noise=class_noise)
        if not 0.0 < rho <= 1.0 or schedule_steps < 0 or not 1 <= first_horizon <= horizon or first_std < 0.0:
            raise ConfigError(
                f"rho={rho}, schedule_steps={schedule_steps}, first_horizon={first_horizon}, first_std={first_std}: "
                f"expected 0 < rho <= 1, schedule_steps >= 0, first_horizon from 1 to horizon={horizon}, and "
                "first_std >= 0."
            )
        self.rho, self.entropy_scale, self.priority_floor = rho, entropy_scale, priority_floor
        self.loss_scales = {"consistency": consistency_scale, "reward": reward_scale, "value": value_scale}
        self.loss_scales["termination"] = termination_scale
        self.schedule_steps, self.first_horizon, self.first_std = schedule_steps, first_horizon, first_std

    def _bind_context(self, context: WorkflowContext) -> None:
        self.slow_encoder = context.component("slow_encoder", SlowTarget)
        super()._bind_context(context)
        self.final_std = float(self.planner.std_floor) if isinstance(self.planner, TDMPCPlanner) else 0.0
        self.step_weight = self._powers(self.rho, self.horizon + 1)
        self._follow_schedule(0)

    # Planning ---------------------------------------------------------------------------------------------------------

    def _follow_schedule(self, step: int) -> None:
        """Short plans with much noise while the model is poor. Another planner keeps its own settings."""
        self._env_steps = step
        if not isinstance(self.planner, TDMPCPlanner):
            return
        share = min(1.0, step / self.schedule_steps) if self.schedule_steps else 1.0
        self.planner.std_floor.fill_(self.first_std + share * (self.final_std - self.first_std))
        self.planner.planned = int(self.first_horizon + share * (self.planner.horizon - self.first_horizon))

    def _plan_kind(self, num_envs: int, mode: Mode) -> tuple[Any, ...]:
        planned = self.planner.planned if isinstance(self.planner, TDMPCPlanner) else 0
        return num_envs, mode, planned

    def collect_step(self, step: int, *, phase: PhaseView) -> CollectResult | None:
        self._follow_schedule(step)
        return super().collect_step(step, phase=phase)

    def log_metrics(self, step: int, writer: MetricsSink) -> None:
        if isinstance(self.planner, TDMPCPlanner):
            writer.scalar("workflow/planned_steps", float(self.planner.planned))

    # Updates ----------------------------------------------------------------------------------------------------------

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step on the losses of model and Qs; then one of the policy, at the latents of before that step and by the
        Qs of after it."""
        window = self._window(inputs)
        with self.context.autocast():
            losses, latents, priority, metrics = self.model_losses(window)
            total = self._total(losses)
        self._optimize(self.model_optimizer, total / self.horizon)
        losses |= self._policy_step(latents.detach(), window, metrics)
        self.slow_encoder.update(self.encoder)
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        return self._packed("update", metrics) | {"priority": priority}

    def _world_model_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window = self._window(inputs)
        with self.context.autocast():
            with torch.no_grad():
                following = self.slow_encoder.network(window.following).float()
            losses = self._means(self.world_model_losses(self.roll_out(window), window, following), window)
            total = self._total(losses)
        self._optimize(self.model_optimizer, total / self.horizon, WORLD_MODEL)
        self.slow_encoder.update(self.encoder)
        metrics = {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        return self._packed("update_world_model", metrics)

    def _controller_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window = self._window(inputs)
        with self.context.autocast():
            with torch.no_grad():
                _, target = self.targets(window)
                latents = self.roll_out(window).latents
            by_window, error, metrics = self.value_loss(latents, window, target)
            losses = self._means({"value": by_window}, window)
        self._optimize(self.model_optimizer, self._total(losses) / self.horizon, BEHAVIOUR)
        losses |= self._policy_step(latents, window, metrics)
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()}
        return self._packed("update_controller", metrics) | {"priority": self._priority(error, window)}

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

    def _use_outputs(self, outputs: Mapping[str, Tensor], batch: SequenceBatch, phase: PhaseView) -> None:
        """New priorities go back to the replay."""
        if "priority" not in outputs or batch.weight is None or batch.indices is None or phase.data_source is None:
            return
        self.context.data_sources[phase.data_source].update(batch.indices[:, 0], {"priority": outputs["priority"]})

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        window = self._window(self._inputs(batch))
        with self.context.autocast():
            losses, latents, _, _ = self.model_losses(window)
            return losses | {"policy": self.policy_loss(latents, window.alive)[0]}

    # The world model and the Qs ---------------------------------------------------------------------------------------

    def model_losses(self, window: Window) -> tuple[Losses, Tensor, Tensor, dict[str, Tensor]]:
        """Consistency, reward, termination and value, unscaled; the latents z_0 … z_H; priorities; metrics."""
        with torch.no_grad():
            following, target = self.targets(window)
        rolled = self.roll_out(window)
        by_window = self.world_model_losses(rolled, window, following)
        by_window["value"], error, metrics = self.value_loss(rolled.latents, window, target)
        return self._means(by_window, window), rolled.latents, self._priority(error, window), metrics

    def targets(self, window: Window) -> tuple[Float[Tensor, "horizon batch latent"], Float[Tensor, "horizon batch"]]:
        """z̄ = h̄(s') by the slow encoder, and y = r + γ (1 - end) min of the slow Qs at (h(s'), π(h(s')) + noise)."""
        noise, members = self.policy.draw_noise(window.reward.shape), self.q.draw_pair()
        return self._targets(window.following, window.reward, window.terminal, noise, members)

    def _targets(
        self, following: dict[str, Tensor], reward: Tensor, terminal: Tensor, noise: Tensor, members: Tensor
    ) -> tuple[Tensor, Tensor]:
        slow: Tensor = self.slow_encoder.network(following).float()
        latent = self.encoder(following).float()
        action = self.policy.sample(latent, noise)
        values = self.q.mean(self.q.target(latent.flatten(0, 1), action.flatten(0, 1), members))
        return slow, reward + self.model.discount * (1.0 - terminal) * values.amin(0).view_as(reward)

    def world_model_losses(
        self, rolled: RolledOut, window: Window, following: Float[Tensor, "horizon batch latent"]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Squared errors of latents and rewards, cross-entropy of ends: sums over each window, step k by ρ^k."""
        weight = window.valid * self.step_weight[:-1]
        after = rolled.latents[1:]
        losses = {
            "consistency": (weight * (after - following).square().mean(-1)).sum(0),
            "reward": (weight * self.model.reward_loss(rolled.reward, window.reward)).sum(0),
        }
        if self.model.episodic:
            logit = self.model.termination_logit(after)
            miss = F.binary_cross_entropy_with_logits(logit, window.terminal, reduction="none")
            losses["termination"] = (window.valid * miss).sum(0)
        return losses

    def value_loss(
        self, latents: Float[Tensor, "states batch latent"], window: Window, target: Float[Tensor, "horizon batch"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"], dict[str, Tensor]]:
        """Squared errors of both Qs at (z_k, a_k), likewise; the sums of their absolute errors; metrics."""
        keep = self.q.draw_keep(self.q.members, target.numel())
        loss, error, value = self._value_loss(latents, window, target, keep)
        mean_target = (window.valid * target).sum() / window.valid.sum().clamp(min=1.0)
        return loss, error, {"q/value": value, "q/target": mean_target}

    def _value_loss(
        self, latents: Tensor, window: Window, target: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = window.valid * self.step_weight[:-1]
        outputs = self.q(latents[:-1].flatten(0, 1), window.action.flatten(0, 1), keep=keep)
        outputs, targets = outputs.unflatten(1, target.shape), target.expand(self.q.members, -1, -1)
        values = self.q.mean(outputs.detach())
        loss = (weight * self.q.loss(outputs, targets).sum(0)).sum(0)
        return loss, (weight * (values - targets).abs().sum(0)).sum(0), values.mean()

    def _means(self, by_window: Mapping[str, Float[Tensor, " batch"]], window: Window) -> Losses:
        """Means over the batch, each window with its weight in prioritised replay, and none above a limit."""
        weight = 1.0 if window.weight is None else window.weight
        return {name: (weight * loss.clamp(max=LARGEST_LOSS)).mean() for name, loss in by_window.items()}

    def _priority(self, error: Float[Tensor, " batch"], window: Window) -> Float[Tensor, " batch"]:
        """The new priority of each window; 0 where it begins with an episode's last record, which teaches nothing."""
        priority = window.valid[0] * (error.clamp(max=LARGEST_PRIORITY) + self.priority_floor)
        return priority.nan_to_num(self.priority_floor, self.priority_floor)

    # The policy -------------------------------------------------------------------------------------------------------

    def policy_loss(
        self, latents: Float[Tensor, "states batch latent"], alive: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """-min of the Qs, which are frozen, summed over z_0 … z_H; step k counts ρ^k."""
        value, entropy = self.policy_values(latents)
        objective = value + self.entropy_scale * entropy
        loss = -(alive * self.step_weight * objective).mean(1).sum()
        return loss, {"policy/value": value.mean(), "policy/entropy": entropy.mean()}

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"env_steps": self._env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._follow_schedule(state["env_steps"])

"""TD-MPC (Hansen, Wang & Su, 2022): temporal difference learning and model predictive control in one latent space.

A deterministic latent model is learned to agree with a slow copy of its encoder, to predict rewards and two values, all
by squared errors on windows that prioritised replay chooses. A policy maximises the smaller value. Actions are planned,
over a horizon that grows and with a least deviation that shrinks in the first part of training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.controllers.critics import SlowTarget
from rl_lab.components.planners.tdmpc import TDMPCPlanner
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import TensorMetrics
from rl_lab.records import CollectResult, SequenceBatch
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import MetricsSink, PhaseView, WorkflowContext
from rl_lab.workflows.latent_planning import LatentPlanning, Losses, RolledOut, Window

LARGEST_LOSS = 1e4  # of one window


class TDMPC(LatentPlanning):
    """Methods appear in the order: planning, the update, the world model, the policy."""

    name = "tdmpc"
    pair = "min"
    compiled = ("_targets", "_window_losses")
    plans_are_of_one_length = False

    def __init__(
        self,
        *,
        batch_size: int = 512,
        horizon: int = 5,  # transitions of a window, and the planner's horizon in the end
        rho: float = 0.5,  # a step counts this much less than the one before it
        consistency_scale: float = 2.0,
        reward_scale: float = 0.5,
        value_scale: float = 0.1,
        termination_scale: float = 1.0,
        entropy_scale: float = 0.0,  # for discrete actions; the continuous policy has no entropy
        schedule_steps: int = 25_000,  # env steps until horizon and deviation have reached their final values
        first_horizon: int = 1,
        first_std: float = 0.5,  # the planner's least deviation at first; its own min_std in the end
        priority_floor: float = 1e-6,
        act_with: str = "planner",  # or policy
        class_noise: float = 0.05,  # share of random discrete actions while training
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

    # The update -------------------------------------------------------------------------------------------------------

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on the model and the values, one on the policy; new priorities."""
        outputs = self._step(self._inputs(batch))
        if batch.weight is not None and batch.indices is not None and phase.data_source is not None:
            self.context.data_sources[phase.data_source].update(batch.indices[:, 0], {"priority": outputs["priority"]})
        return TensorMetrics(self._metric_names, outputs["metrics"])

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        window = self._window(inputs)
        with self.context.autocast():
            losses, latents, priority, metrics = self.model_losses(window)
            total = torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()
        self._optimize(self.model_optimizer, total / self.horizon)
        with self.context.autocast():
            policy_loss, policy_metrics = self.policy_loss(latents.detach(), window.alive)
        self._optimize(self.policy_optimizer, policy_loss)
        self.q.update_slow()
        self.slow_encoder.update(self.encoder)
        metrics |= policy_metrics | {f"loss/{name}": loss for name, loss in losses.items()}
        return self._packed(metrics | {"loss/total": total, "loss/policy": policy_loss}) | {"priority": priority}

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        window = self._window(self._inputs(batch))
        with self.context.autocast():
            losses, latents, _, _ = self.model_losses(window)
            return losses | {"policy": self.policy_loss(latents, window.alive)[0]}

    # The world model --------------------------------------------------------------------------------------------------

    def model_losses(self, window: Window) -> tuple[Losses, Tensor, Tensor, dict[str, Tensor]]:
        """Consistency, reward, value and termination, unscaled; the latents z_0 … z_H; priorities; values to watch."""
        window = window._replace(observation=self.encoder.augment(window.observation))
        horizon, batch = window.reward.shape
        with torch.no_grad():
            noise, pair = self.policy.draw_noise((horizon, batch)), self.q.draw_pair()
            following, target = self._targets(window.following, window.reward, window.terminal, noise, pair)
        rolled = self.roll_out(window)
        keep = self.q.draw_keep(self.q.members, horizon * batch)
        windows, error, value = self._window_losses(rolled, window, following, target, keep)
        weight = torch.ones_like(error) if window.weight is None else window.weight
        losses = {name: (weight * loss.clamp(max=LARGEST_LOSS)).mean() for name, loss in windows.items()}
        # A window that begins with an episode's last record has nothing to teach: it is not drawn again.
        priority = window.valid[0] * (error + self.priority_floor)
        priority = priority.nan_to_num(self.priority_floor, self.priority_floor)
        metrics = {"q/value": value, "q/target": (window.valid * target).sum() / window.valid.sum().clamp(min=1.0)}
        return losses, rolled.latents, priority, metrics

    def _targets(
        self, following: dict[str, Tensor], reward: Tensor, terminal: Tensor, noise: Tensor, pair: Tensor
    ) -> tuple[Float[Tensor, "horizon batch latent"], Float[Tensor, "horizon batch"]]:
        """z̄ = h̄(s') by the slow encoder, and y = r + γ (1 - end) min of the slow Qs at (h(s'), π(h(s')) + noise)."""
        slow: Tensor = self.slow_encoder.network(following).float()
        latent = self.encoder(following).float()
        action = self.policy.sample(latent, noise)
        values = self.q.mean(self.q.target(latent.flatten(0, 1), action.flatten(0, 1), pair))
        return slow, reward + self.model.discount * (1.0 - terminal) * values.amin(0).view_as(reward)

    def _window_losses(
        self, rolled: RolledOut, window: Window, following: Tensor, target: Tensor, keep: Tensor | None
    ) -> tuple[dict[str, Float[Tensor, " batch"]], Float[Tensor, " batch"], Tensor]:
        """Summed over the steps of each window, step k by ρ^k; the summed errors of the values; the mean value."""
        horizon, batch = window.reward.shape
        weight = window.valid * self.step_weight[:-1]
        before, after = rolled.latents[:-1], rolled.latents[1:]
        outputs = self.q(before.flatten(0, 1), window.action.flatten(0, 1), keep=keep).unflatten(1, (horizon, batch))
        targets = target.expand(self.q.members, -1, -1)
        losses = {
            "consistency": (weight * (after - following).square().mean(-1)).sum(0),
            "reward": (weight * self.model.reward_loss(rolled.reward, window.reward)).sum(0),
            "value": (weight * self.q.loss(outputs, targets).sum(0)).sum(0),
        }
        if self.model.episodic:
            logit = self.model.termination_logit(after)
            miss = F.binary_cross_entropy_with_logits(logit, window.terminal, reduction="none")
            losses["termination"] = (window.valid * miss).sum(0)
        values = self.q.mean(outputs.detach())
        error = (weight * (values - targets).abs().sum(0)).sum(0)
        return losses, error, values.mean()

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

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"env_steps": self._env_steps}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._follow_schedule(state["env_steps"])

"""Model-based MPC: learn a model of observations from what was done, and plan in it.

Without a policy it is PETS (Chua et al., 2018): an ensemble and CEM. With a policy and a critic, they learn from the
same experience, the planner tries what the policy would do, and counts the critic's value beyond its horizon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rl_lab.components.actors.dreamer import Actor
from rl_lab.components.critics.dreamer import Critic
from rl_lab.components.dynamics.base import Dynamics
from rl_lab.components.dynamics.outcomes import OutcomeModel
from rl_lab.components.planners.base import Plan
from rl_lab.errors import ConfigError
from rl_lab.losses.returns import masked_discount
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import BatchSpec, SequenceBatch
from rl_lab.simulation.learned import LearnedSimulator, Propagation
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.mpc import MPC

MAX_WEIGHT = 20.0  # of an imitated action


class Transitions(NamedTuple):
    """Pairs of consecutive records, flat. Where `valid` is False there is no successor: an episode ended."""

    observation: Tensor  # [rows, observation]
    action: Tensor  # [rows, action] encoded
    following: Tensor
    reward: Tensor  # [rows] on arriving there
    is_terminal: Tensor
    valid: Tensor  # [rows] bool
    record: Tensor | None  # [rows] int64


class MBMPC(MPC):
    """Methods appear in the order: the model, the policy and its value."""

    name = "mbmpc"
    update_hooks: ClassVar[tuple[str, ...]] = ("update_world_model", "update_controller")

    def __init__(
        self,
        *,
        batch_size: int,  # sequences
        sequence_length: int,  # records: one transition less
        train_every: float,  # env steps for each update, where the phases do not say
        discount: float,
        value_horizon: int,  # steps that the policy is followed in the model for the critic's targets
        imitation_temperature: float,  # of the advantages, in deviations, by which actions are imitated
        propagation: Propagation,
        exploration: float,  # while training: deviation of the noise, or share of random discrete actions
    ) -> None:
        if sequence_length < 2 or train_every <= 0.0:
            raise ConfigError(
                f"sequence_length={sequence_length}, train_every={train_every}: expected at least 2 records (one "
                "transition) and more than 0 env steps."
            )
        if not 0.0 <= discount <= 1.0 or value_horizon < 1 or imitation_temperature <= 0.0:
            raise ConfigError(
                f"discount={discount}, value_horizon={value_horizon}, imitation_temperature={imitation_temperature}: "
                "expected a discount from 0 to 1, at least one step, and a temperature above 0."
            )
        self.batch_size, self.sequence_length, self.train_every = batch_size, sequence_length, train_every
        self.discount, self.value_horizon, self.imitation_temperature = discount, value_horizon, imitation_temperature
        self.propagation: Propagation = propagation
        self.exploration = exploration

    def _bind_context(self, context: WorkflowContext) -> None:
        self.dynamics = context.component("dynamics", Dynamics)
        self.outcome = context.component("outcome", OutcomeModel)
        self.policy = context.controller("policy", Actor) if "policy" in context.controllers else None
        self.critic = context.controller("critic", Critic) if "critic" in context.controllers else None
        self.model_optimizer = context.optimizer("model", FlatAdam) if context.optimizers else None
        if self.critic is not None and self.critic.slow is None:
            raise ConfigError("controllers.critic.slow_rate is null: its slow copy gives the targets. Use 0.02, say.")
        has_behaviour = bool(context.optimizers) and self.policy is not None
        self.behaviour_optimizer = context.optimizer("behaviour", FlatAdam) if has_behaviour else None
        super()._bind_context(context)

    def _simulator(self, context: WorkflowContext) -> LearnedSimulator:
        return LearnedSimulator(
            dynamics=self.dynamics,
            outcome=self.outcome,
            propagation=self.propagation,
            discount=self.discount,
            policy=self.policy,
            critic=self.critic,
        )

    def _choose(self, plan: Plan, mode: Mode) -> Tensor:
        if mode == "eval" or self.exploration == 0.0:
            return plan.action
        layout, noise = self.planner.layout, torch.randn_like(plan.action)
        if not layout.classes:
            return layout.valid(plan.action + self.exploration * noise)
        explore = torch.rand(len(noise), 1, device=noise.device) < self.exploration
        return torch.where(explore, layout.uniform(noise), plan.action)

    # The model --------------------------------------------------------------------------------------------------------

    @property
    def updates_per_env_step(self) -> float:
        return 1.0 / self.train_every

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, self.sequence_length, device=str(self.context.device))

    def transitions(self, batch: SequenceBatch) -> Transitions:
        vector, action = self.dynamics.vector.join(batch.observation), self.codec.encode(batch.action)

        def pairs(value: Tensor, shift: int) -> Tensor:
            return value[:, shift : value.shape[1] - 1 + shift].flatten(0, 1)

        return Transitions(
            pairs(vector, 0), pairs(action, 0), pairs(vector, 1), pairs(batch.reward, 1), pairs(batch.is_terminal, 1),
            ~pairs(batch.is_last, 0), None if batch.indices is None else pairs(batch.indices, 0),
        )  # fmt: skip

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step of the dynamics and, where it is learned, of reward and continuation."""
        assert self.model_optimizer is not None
        seen = self.transitions(batch)
        self.dynamics.update_statistics(seen.observation, seen.action, seen.following, seen.valid)
        losses = self.model_losses(seen)
        loss = losses.pop("total")
        self.model_optimizer.zero_grad()
        loss.backward()
        self.model_optimizer.step(loss=loss)
        metrics = {f"loss/{name}": value for name, value in losses.items()}
        return TensorMetrics.pack(metrics | {"optimizer/model_grad_norm": self.model_optimizer.last_grad_norm})

    def model_losses(self, seen: Transitions) -> dict[str, Tensor]:
        """The loss that is minimised (`total`) and its terms."""
        loss, metrics = self.dynamics.loss(seen.observation, seen.action, seen.following, seen.valid, seen.record)
        further = self.outcome.losses(
            seen.observation, seen.action, seen.following, seen.reward, seen.is_terminal, seen.valid
        )
        return {"total": loss + sum(further.values()), **metrics, **further}

    # The policy and its value -----------------------------------------------------------------------------------------

    def update_controller(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step of the critic on the policy's returns in the model, and of the policy by advantage-weighted
        regression on replayed actions."""
        if self.behaviour_optimizer is None or self.critic is None:
            raise ConfigError(
                "update_controller: this experiment has no policy and critic to train. Add controllers.policy, "
                "controllers.critic and optimizers.behaviour (see +experiment=mbmpc), or take the hook out."
            )
        losses = self.behaviour_losses(self.transitions(batch))
        loss = losses["value"] + losses["policy"]
        self.behaviour_optimizer.zero_grad()
        loss.backward()
        self.behaviour_optimizer.step(loss=loss)
        self.critic.update_slow()
        metrics = {f"loss/{name}": losses[name] for name in ("value", "policy")}
        metrics |= {"value": losses["mean_value"], "entropy": losses["entropy"]}
        return TensorMetrics.pack(metrics | {"optimizer/grad_norm": self.behaviour_optimizer.last_grad_norm})

    def behaviour_losses(self, seen: Transitions) -> dict[str, Tensor]:
        """R: the policy's return in the model from a replayed state, with the slow critic's value at the end.
        A = r + γ c V'(s') - V'(s): the advantage of the replayed transition by the slow critic.

        value: the critic's loss with target R. policy: -exp(A / (τ·std A)) ln π(a | s), advantage-weighted regression:
        the planner's actions are imitated, the good ones more.
        """
        policy, critic = self.policy, self.critic
        assert policy is not None
        assert critic is not None
        features = self.dynamics.features(seen.observation)
        weight = seen.valid.float()
        total = weight.sum().clamp(min=1.0)
        with torch.no_grad():
            target = self.policy_returns(seen.observation)
            live = masked_discount(seen.is_terminal, self.discount)
            following = critic.slow_mean(self.dynamics.features(seen.following))
            advantage = seen.reward + live * following - critic.slow_mean(features)
            center = (weight * advantage).sum() / total
            spread = ((weight * (advantage - center).square()).sum() / total).sqrt().clamp(min=1e-6)
            imitation = ((advantage - center) / (self.imitation_temperature * spread)).exp().clamp(max=MAX_WEIGHT)
        output = critic(features)
        distribution = policy.distribution(policy(features))
        return {
            "value": (weight * critic.loss(output, target)).sum() / total,
            "policy": -(weight * imitation * distribution.log_prob(seen.action)).sum() / total,
            "mean_value": (weight * critic.mean(output)).sum() / total,
            "entropy": (weight * distribution.entropy()).sum() / total,
        }

    @torch.no_grad()
    def policy_returns(self, observation: Tensor) -> Tensor:
        """Discounted rewards of `value_horizon` steps of the present policy in the model, then the slow critic's value,
        from each observation [rows, observation]; [rows]."""
        assert self.critic is not None
        rollout = self.planner.simulator.rollout(observation, None, self.value_horizon)
        value = self.critic.slow_mean(self.dynamics.features(rollout.states[-1]))
        for reward, goes_on in zip(rollout.reward.unbind(1)[::-1], rollout.continuation.unbind(1)[::-1], strict=True):
            value = reward + self.discount * goes_on * value
        return value

    def batch_losses(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        seen = self.transitions(batch)
        losses: dict[str, Any] = self.model_losses(seen)
        if self.policy is not None and self.critic is not None:
            behaviour = self.behaviour_losses(seen)
            losses |= {name: behaviour[name] for name in ("value", "policy")}
        return losses

"""DreamerV3 (Hafner et al., 2023; the current form of the algorithm): one world model, one loss, one optimiser.

An update learns the world model from replayed sequences, dreams from every state in them, and learns actor and critic
from the dreams. Stop-gradients decide who learns what; there is a single backward pass. Shapes are static and nothing
waits for the device, so that the whole update can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.controllers.actors import Actor
from rl_lab.components.controllers.critics import Critic
from rl_lab.components.predictors import ContinuePredictor
from rl_lab.components.representation_learners.base import LatentState
from rl_lab.components.return_computers import lambda_returns
from rl_lab.errors import ConfigError, nearest
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.capture import CapturedStep, compile_block
from rl_lab.nn.normalizers import ReturnNormalizer
from rl_lab.nn.optimizers import LaProp
from rl_lab.records import SequenceBatch
from rl_lab.workflows.base import Mode
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.latent import LatentWorkflow, Replayed

LOSS_SCALES = {
    "observation": 1.0, "reward": 1.0, "continue": 1.0, "dynamics": 1.0, "representation": 0.1,
    "policy": 1.0, "value": 1.0, "replay_value": 0.3,
}  # fmt: skip

Losses = dict[str, Tensor]


class DreamerV3(LatentWorkflow):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v3"
    update_hooks = ("update",)

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
        entropy_scale: float = 3e-4,
        slow_value_scale: float = 1.0,
        loss_scales: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, sequence_length=sequence_length, train_ratio=train_ratio,
            stored_latents=stored_latents,
        )  # fmt: skip
        self.horizon, self.lambda_, self.free_nats = horizon, lambda_, free_nats
        self.entropy_scale, self.slow_value_scale = entropy_scale, slow_value_scale
        for name in loss_scales or {}:
            if name not in LOSS_SCALES:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, LOSS_SCALES)}")
        self.loss_scales = LOSS_SCALES | dict(loss_scales or {})

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.continuation = context.component("continue", ContinuePredictor)
        self.return_scale = context.component("return_normalizer", ReturnNormalizer)
        self.actor = context.controller("policy", Actor)
        self.critic = context.controller("critic", Critic)
        self.optimizer = context.optimizer("main", LaProp) if context.optimizers else None  # none where it only acts
        self.discount = self.continuation.discount
        self._metric_names: tuple[str, ...] = ()
        self._step: Callable[[dict[str, Tensor]], dict[str, Tensor]] = self._train_step
        if context.compile:
            self._compile()

    def _compile(self) -> None:
        """Compiled pieces inside one captured CUDA graph. The plain methods stay the reference."""
        self.rssm.compile_steps()
        for name in (
            "_encode",
            "_prediction_losses",
            "_judge",
            "_evaluate_critic",
            "_actor_critic_losses",
            "_replayed_value_loss",
        ):
            setattr(self, name, compile_block(getattr(self, name)))
        self._step = CapturedStep(self._train_step, self._changing_tensors)

    def _choose_action(self, latent: LatentState, *, mode: Mode) -> Tensor:
        """A sample while training; the likeliest action in an evaluation."""
        distribution = self.actor.distribution(self.actor(latent.features))
        return distribution.sample() if mode == "train" else distribution.mode()

    # Learning ---------------------------------------------------------------------------------------------------------

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on everything; the fresh latents go back into the replay."""
        self._write_pending_latents()
        outputs = self._step(self._inputs(batch))
        if self.latent_specs and phase.data_source is not None and batch.indices is not None:
            self._write_latents(phase.data_source, batch.indices[:, 1:], {n: outputs[n] for n in self.latent_specs})
        return TensorMetrics(self._metric_names, outputs["metrics"])

    def _train_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.optimizer is not None
        with self.context.autocast():
            losses, states, metrics = self.losses(self._replayed(inputs))
            total = torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        self.optimizer.step(loss=total)
        self.critic.update_slow()
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | {"loss/total": total}
        metrics |= {f"optimizer/{name}": value for name, value in self.optimizer.metrics().items()}
        packed = TensorMetrics.pack(metrics)
        self._metric_names = packed.names
        latents = self.rssm.to_stored(states.detach()) if self.latent_specs else {}
        return latents | {"metrics": packed.values_vector}

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        with self.context.autocast():
            return self.losses(self._replayed(self._inputs(batch)))[0]

    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Every term of the one loss, unscaled; the posterior states; values to watch."""
        model_losses, states, metrics = self.world_model_losses(data)
        behaviour_losses, returns, slow_value, behaviour_metrics = self.behaviour_losses(states)
        replay_value = self.replay_value_loss(states, data, returns, slow_value)
        return model_losses | behaviour_losses | {"replay_value": replay_value}, states, metrics | behaviour_metrics

    def world_model_losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Prediction, dynamics and representation terms over replayed sequences."""
        embed = self._encode(data.observation)
        states, posterior_params = self.rssm.observe(embed, data.prev_action, data.is_first, data.initial)
        losses, metrics = self._prediction_losses(states, posterior_params, embed, data)
        return losses, states, metrics

    def _encode(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation)

    def _prediction_losses(
        self, states: LatentState, posterior_params: Tensor, embed: Tensor, data: Replayed
    ) -> tuple[Losses, dict[str, Tensor]]:
        """What the states must explain: the observation, the reward, the episode's end, and each other."""
        features = states.features
        posterior = self.rssm.distribution(posterior_params)
        prior = self.rssm.distribution(self.rssm.prior(states.deter))
        dynamics = self.rssm.divergence(posterior.detach(), prior)
        representation = self.rssm.divergence(posterior, prior.detach())
        reconstruction = self.decoder.losses(states, embed, data.observation)
        losses = {
            "observation": torch.stack([loss.mean() for loss in reconstruction.values()]).sum(),
            "reward": self.reward.loss(self.reward(features), data.reward).mean(),
            "continue": self.continuation.loss(self.continuation(features), data.is_terminal).mean(),
            # One free nat for each step, not for their mean.
            "dynamics": dynamics.clamp_min(self.free_nats).mean(),
            "representation": representation.clamp_min(self.free_nats).mean(),
        }
        metrics = {f"reconstruction/{key}": loss.mean() for key, loss in reconstruction.items()}
        metrics |= {"latent/kl": dynamics.mean(), "latent/prior_entropy": self.rssm.entropy(prior).mean()}
        metrics |= {"latent/posterior_entropy": self.rssm.entropy(posterior).mean()}
        return losses, metrics

    def behaviour_losses(self, states: LatentState) -> tuple[Losses, Tensor, Tensor, dict[str, Tensor]]:
        """Actor and critic, on dreams from every replayed state. No gradient reaches the world model.

        Also returns the λ-return and the slow critic's value of each start state, [batch, time].
        """
        lead, start = states.deter.shape[:2], self.rssm.starts(states)
        with torch.no_grad():
            features, actions = self._dream(start)
            reward, continuation, slow_value = self._judge(features)
        value_output = self._evaluate_critic(features)
        with torch.no_grad():
            value = self.critic.mean(value_output)
            returns = lambda_returns(reward, continuation, value, self.lambda_, dim=0)
            scale = self.return_scale(returns)
            advantage = (returns - value[:-1]) / scale
            weight = continuation.cumprod(0)[:-1]  # how surely the dream is still alive, its first state included
        losses, metrics = self._actor_critic_losses(
            features[:-1], actions, value_output[:-1], advantage, weight, returns, slow_value[:-1]
        )
        metrics |= {"dream/reward": reward.mean(), "dream/continue": continuation.mean(), "dream/value": value.mean()}
        metrics |= {"dream/return": returns.mean(), "dream/return_scale": scale}
        return losses, returns[0].unflatten(0, lead), slow_value[0].unflatten(0, lead), metrics

    def _judge(self, features: Float[Tensor, "time starts size"]) -> tuple[Tensor, Tensor, Tensor]:
        """The model's reward and continuation and the slow critic's value of every dreamed state."""
        return (
            self.reward.mean(self.reward(features)),
            self.continuation.mean(self.continuation(features)),
            self.critic.mean(self.critic.slow(features)),
        )

    def _evaluate_critic(self, features: Tensor) -> Tensor:
        return self.critic(features)

    def _actor_critic_losses(
        self, features: Tensor, actions: Tensor, value_output: Tensor, advantage: Tensor, weight: Tensor,
        returns: Tensor, slow_value: Tensor,
    ) -> tuple[Losses, dict[str, Tensor]]:  # fmt: skip
        """REINFORCE with normalised advantages for the actor, two-hot regression for the critic."""
        policy = self.actor.distribution(self.actor(features))
        entropy = policy.entropy()
        policy_loss = -weight * (policy.log_prob(actions) * advantage + self.entropy_scale * entropy)
        value_loss = weight * self._value_loss(value_output, returns, slow_value)
        metrics = {"policy/entropy": entropy.mean(), "policy/advantage_size": advantage.abs().mean()}
        return {"policy": policy_loss.mean(), "value": value_loss.mean()}, metrics

    def replay_value_loss(self, states: LatentState, data: Replayed, returns: Tensor, slow_value: Tensor) -> Tensor:
        """The critic on the replayed sequence itself; its gradient does reach the world model.

        Rewards are the real ones; where the sequence or an episode stops, the dreamed return of that state takes over.
        """
        live = (1.0 - data.is_terminal.float()) * self.discount
        mixing = (1.0 - data.is_last.float()) * self.lambda_
        targets = lambda_returns(data.reward, live, returns, mixing, dim=1)
        alive = 1.0 - data.is_last[:, :-1].float()
        return self._replayed_value_loss(states.features, targets, slow_value, alive)

    def _replayed_value_loss(self, features: Tensor, targets: Tensor, slow_value: Tensor, alive: Tensor) -> Tensor:
        return (alive * self._value_loss(self.critic(features[:, :-1]), targets, slow_value[:, :-1])).mean()

    def _value_loss(self, output: Tensor, target: Tensor, slow_value: Tensor) -> Tensor:
        """Towards the return, and towards the slow critic's own prediction."""
        return self.critic.loss(output, target) + self.slow_value_scale * self.critic.loss(output, slow_value)

    def _dream(self, start: LatentState) -> tuple[Tensor, Tensor]:
        """Features [horizon + 1, starts, size] and the actions taken in all but the last."""
        starts, device = start.deter.shape[0], start.deter.device
        noise = self.rssm.draw_noise((self.horizon, starts), device)
        action_noise = self.actor.draw_noise((self.horizon, starts), device)
        dream = self.rssm.imagine(start, self._choose, latent_noise=noise, action_noise=action_noise)
        return dream.states.features, dream.actions

    def _choose(self, features: Tensor, noise: Tensor) -> Tensor:
        return self.actor.distribution(self.actor(features)).sample(noise)

    def _changing_tensors(self) -> list[Tensor]:
        assert self.optimizer is not None
        return self._model_tensors() + self.optimizer.state_tensors()

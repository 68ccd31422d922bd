"""DreamerV3 (Hafner et al., 2023; the current form of the algorithm): one world model, one loss, one optimiser.

An update learns the world model from replayed sequences, dreams from every state in them, and learns actor and critic
from the dreams. Stop-gradients decide who learns what; there is a single backward pass. Shapes are static and nothing
waits for the device, so that the whole update can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.actions import ActionCodec
from rl_lab.components.controllers.actors import Actor
from rl_lab.components.controllers.critics import Critic
from rl_lab.components.decoders import MultiKeyDecoder
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.representation_learners.rssm import BlockRSSM, LatentState
from rl_lab.components.return_computers import lambda_returns
from rl_lab.errors import ConfigError, nearest
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.capture import CapturedStep, compile_block
from rl_lab.nn.distributions import categorical_kl
from rl_lab.nn.math import one_hot
from rl_lab.nn.normalizers import ReturnNormalizer
from rl_lab.nn.optimizers import LaProp
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    Fields,
    FieldSpec,
    ImaginedRollout,
    Observation,
    SequenceBatch,
)
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

DETER, STOCH = "latent.deter", "latent.stoch"  # the fields that keep the latent state of each record

LOSS_SCALES = {
    "observation": 1.0, "reward": 1.0, "continue": 1.0, "dynamics": 1.0, "representation": 0.1,
    "policy": 1.0, "value": 1.0, "replay_value": 0.3,
}  # fmt: skip

Losses = dict[str, Tensor]


class Replayed(NamedTuple):
    """The part of a batch that is trained on, with what came before it."""

    observation: dict[str, Tensor]  # [batch, time, ...]
    prev_action: Float[Tensor, "batch time action"]  # the encoded action that led to each observation
    reward: Float[Tensor, "batch time"]
    is_first: Tensor
    is_last: Tensor
    is_terminal: Tensor
    initial: LatentState  # the stored latent of the record before the first


class DreamerV3(Workflow):
    """Methods appear in the order in which the paper introduces them."""

    name = "dreamer_v3"
    update_hooks = ("update",)

    def __init__(
        self,
        *,
        batch_size: int = 16,
        sequence_length: int = 64,
        train_ratio: float = 512.0,
        horizon: int = 15,
        lambda_: float = 0.95,
        free_nats: float = 1.0,
        entropy_scale: float = 3e-4,
        slow_value_scale: float = 1.0,
        loss_scales: Mapping[str, float] | None = None,
    ) -> None:
        self.batch_size, self.sequence_length, self.train_ratio = batch_size, sequence_length, train_ratio
        self.horizon, self.lambda_, self.free_nats = horizon, lambda_, free_nats
        self.entropy_scale, self.slow_value_scale = entropy_scale, slow_value_scale
        for name in loss_scales or {}:
            if name not in LOSS_SCALES:
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, LOSS_SCALES)}")
        self.loss_scales = LOSS_SCALES | dict(loss_scales or {})

    def _bind_context(self, context: WorkflowContext) -> None:
        self.encoder = context.component("encoder", nn.Module)
        self.rssm = context.component("rssm", BlockRSSM)
        self.decoder = context.component("decoder", MultiKeyDecoder)
        self.reward = context.component("reward", RewardPredictor)
        self.continuation = context.component("continue", ContinuePredictor)
        self.return_scale = context.component("return_normalizer", ReturnNormalizer)
        self.actor = context.controller("policy", Actor)
        self.critic = context.controller("critic", Critic)
        self.optimizer = context.optimizer("main", LaProp) if context.optimizers else None  # none where it only acts
        self.codec = ActionCodec(context.action_spec)
        self.discount = self.continuation.discount
        self._pending_latents: tuple[str, Tensor, dict[str, Tensor], torch.cuda.Event] | None = None
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

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        latent = self.rssm.initial(num_envs)
        action = latent.deter.new_zeros(num_envs, self.codec.encoded_size)
        return {"deter": latent.deter, "stoch": latent.stoch, "action": action}

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Filter the new observation into the latent state and choose an action from it; `eval` takes the likeliest."""
        device = self.context.device
        with self.context.autocast():
            embed = self.encoder({key: torch.as_tensor(value, device=device) for key, value in observation.items()})
            latent, _ = self.rssm.observe_step(LatentState(state["deter"], state["stoch"]), state["action"], embed)
            distribution = self.actor.distribution(self.actor(latent.features))
            action = distribution.sample() if mode == "train" else distribution.mode()
        state = {"deter": latent.deter.float(), "stoch": latent.stoch.float(), "action": action.float()}
        return self.codec.decode(action).cpu().numpy(), state

    def record_specs(self) -> dict[str, FieldSpec]:
        """The latent state is stored with each record: replayed sequences start from it instead of from nothing."""
        return {DETER: FieldSpec((self.rssm.deter,), "float16"), STOCH: FieldSpec((self.rssm.groups,), "uint8")}

    def record_fields(self, state: AgentState) -> Fields:
        latent = self._stored(LatentState(state["deter"], state["stoch"]))
        return {name: value.cpu().numpy() for name, value in latent.items()}

    def _stored(self, latent: LatentState) -> dict[str, Tensor]:
        choice = latent.stoch.unflatten(-1, (self.rssm.groups, self.rssm.classes)).argmax(-1)
        # A batch that gave NaN must not leave it in the replay: from zeros the next visit starts afresh.
        return {DETER: latent.deter.nan_to_num(0.0).half(), STOCH: choice.to(torch.uint8)}

    # Learning ---------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, self.sequence_length, context=1, device=str(self.context.device))

    @property
    def updates_per_env_step(self) -> float:
        """The train ratio is the number of replayed records per environment step."""
        return self.train_ratio / (self.batch_size * self.sequence_length)

    def update(self, batch: SequenceBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step on everything; the fresh latents go back into the replay."""
        self._write_pending_latents()
        outputs = self._step(self._inputs(batch))
        if phase.data_source is not None and batch.indices is not None:
            self._write_latents(phase.data_source, batch.indices[:, 1:], {n: outputs[n] for n in (DETER, STOCH)})
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
        return self._stored(states.detach()) | {"metrics": packed.values_vector}

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        with self.context.autocast():
            return self.losses(self._replayed(self._inputs(batch)))[0]

    def _inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """What the training step takes, as a flat dict: the form in which a captured step is fed."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
        inputs |= {"action": batch.action, "reward": batch.reward, "is_first": batch.is_first}
        inputs |= {"is_last": batch.is_last, "is_terminal": batch.is_terminal}
        return inputs | {name: batch.extras[name][:, 0] for name in (DETER, STOCH)}

    def _replayed(self, inputs: Mapping[str, Tensor]) -> Replayed:
        """Cut off the context record: only its latent and its action are used."""
        stoch = one_hot(inputs[STOCH], self.rssm.classes).flatten(-2)
        return Replayed(
            observation={
                name.removeprefix(OBSERVATION_PREFIX): value[:, 1:]
                for name, value in inputs.items()
                if name.startswith(OBSERVATION_PREFIX)
            },
            prev_action=self.codec.encode(inputs["action"][:, :-1]),
            reward=inputs["reward"][:, 1:],
            is_first=inputs["is_first"][:, 1:],
            is_last=inputs["is_last"][:, 1:],
            is_terminal=inputs["is_terminal"][:, 1:],
            initial=LatentState(inputs[DETER].float(), stoch),
        )

    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Every term of the one loss, unscaled; the posterior states; values to watch."""
        model_losses, states, metrics = self.world_model_losses(data)
        behaviour_losses, returns, slow_value, behaviour_metrics = self.behaviour_losses(states)
        replay_value = self.replay_value_loss(states, data, returns, slow_value)
        return model_losses | behaviour_losses | {"replay_value": replay_value}, states, metrics | behaviour_metrics

    def world_model_losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Prediction, dynamics and representation terms over replayed sequences."""
        embed = self._encode(data.observation)
        states, posterior_logits = self.rssm.observe(embed, data.prev_action, data.is_first, data.initial)
        losses, metrics = self._prediction_losses(states, posterior_logits, data)
        return losses, states, metrics

    def _encode(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation)

    def _prediction_losses(
        self, states: LatentState, posterior_logits: Tensor, data: Replayed
    ) -> tuple[Losses, dict[str, Tensor]]:
        """What the states must explain: the observation, the reward, the episode's end, and each other."""
        features = states.features
        posterior = self.rssm.categorical(posterior_logits)
        prior = self.rssm.categorical(self.rssm.prior(states.deter))
        dynamics = categorical_kl(posterior.detach(), prior)
        representation = categorical_kl(posterior, prior.detach())
        reconstruction = self.decoder.loss(self.decoder(states.deter, states.stoch), data.observation)
        losses = {
            "observation": torch.stack([loss.mean() for loss in reconstruction.values()]).sum(),
            "reward": self.reward.loss(self.reward(features), data.reward).mean(),
            "continue": self.continuation.loss(self.continuation(features), data.is_terminal).mean(),
            # One free nat for each step, not for their mean.
            "dynamics": dynamics.clamp_min(self.free_nats).mean(),
            "representation": representation.clamp_min(self.free_nats).mean(),
        }
        metrics = {f"reconstruction/{key}": loss.mean() for key, loss in reconstruction.items()}
        metrics |= {"latent/kl": dynamics.mean(), "latent/prior_entropy": prior.entropy().sum(-1).mean()}
        metrics |= {"latent/posterior_entropy": posterior.entropy().sum(-1).mean()}
        return losses, metrics

    def behaviour_losses(self, states: LatentState) -> tuple[Losses, Tensor, Tensor, dict[str, Tensor]]:
        """Actor and critic, on dreams from every replayed state. No gradient reaches the world model.

        Also returns the λ-return and the slow critic's value of each start state, [batch, time].
        """
        lead, start = states.deter.shape[:2], states.detach().flatten()
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
        noise = torch.empty(self.horizon, starts, self.rssm.groups, self.rssm.classes, device=device).exponential_()
        action_noise = self.actor.draw_noise((self.horizon, starts), device)
        dream = self.rssm.imagine(start, self._choose, latent_noise=noise, action_noise=action_noise)
        return dream.states.features, dream.actions

    def _choose(self, features: Tensor, noise: Tensor) -> Tensor:
        return self.actor.distribution(self.actor(features)).sample(noise)

    # Fresh latents go back to the replay ------------------------------------------------------------------------------

    def _write_latents(self, source: str, indices: Tensor, latents: dict[str, Tensor]) -> None:
        """On a GPU the copy to the host runs beside the next steps and is written before the next update."""
        if self.context.device.type != "cuda" or self.context.data_sources[source].on_device:
            self.context.data_sources[source].update(indices, latents)
            return
        copies = {name: value.to("cpu", non_blocking=True) for name, value in latents.items()}
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending_latents = (source, indices, copies, arrived)

    def _write_pending_latents(self) -> None:
        if self._pending_latents is not None:
            source, indices, latents, arrived = self._pending_latents
            arrived.synchronize()
            self.context.data_sources[source].update(indices, latents)
            self._pending_latents = None

    def get_state(self) -> dict:
        self._write_pending_latents()
        return super().get_state()

    def _changing_tensors(self) -> list[Tensor]:
        """Everything that an update changes in place."""
        assert self.optimizer is not None
        modules = [*self.context.components.values(), *(module for _, module in self.context.controllers.items())]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return tensors + self.optimizer.state_tensors()

    # Looking ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def imagine(self, batch: SequenceBatch, *, context: int) -> ImaginedRollout:
        """Filter `context` records from an empty memory, then predict the others from their actions alone."""
        action = self.codec.encode(batch.action)
        prev_action = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
        with self.context.autocast():
            embed = self.encoder(batch.observation)
            seen, _ = self.rssm.observe(
                embed[:, :context], prev_action[:, :context], batch.is_first[:, :context],
                self.rssm.initial(batch.action.shape[0]),
            )  # fmt: skip
            last = LatentState(seen.deter[:, -1], seen.stoch[:, -1])
            ahead = self.rssm.imagine_actions(last, prev_action[:, context:].to(last.deter.dtype))
            states = LatentState(*(torch.cat(parts, 1) for parts in zip(seen, ahead, strict=True)))
            imagined = self.decoder.decode(self.decoder(states.deter, states.stoch))
            reward = self.reward.mean(self.reward(states.features))
            continuation = self.continuation.mean(self.continuation(states.features)) / self.discount
        return ImaginedRollout(
            context=context,
            real={key: value.cpu().numpy() for key, value in batch.observation.items()},
            imagined={key: value.cpu().numpy() for key, value in imagined.items()},
            real_reward=batch.reward.cpu().numpy(),
            imagined_reward=reward.float().cpu().numpy(),
            imagined_continue=continuation.float().cpu().numpy(),
        )

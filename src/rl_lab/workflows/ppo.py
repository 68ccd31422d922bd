"""PPO (Schulman et al., 2017), with the details that its implementations agree on.

A rollout of fresh decisions is judged once: values, log-probabilities and advantages under the policy that made it.
Then it is passed over several times in shuffled minibatches, each one gradient step on the clipped objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.components.controllers.policies import Policy, ValueHead
from rl_lab.components.encoders import handed_on
from rl_lab.components.memories import GRUMemory
from rl_lab.components.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.components.objectives import clipped_surrogate, squared_error
from rl_lab.components.return_computers import recursive_returns
from rl_lab.data_sources.stream import StreamSource
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import Metrics, pack
from rl_lab.nn.arrays import Array, as_array, as_tensor, flags, library, mean
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.plain_mlp import run_heads
from rl_lab.records import BatchSpec, Fields, FieldSpec, Observation, Rollout, RolloutBatch
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

MEMORY = "memory"  # the field that keeps what a recurrent policy remembered before each decision
KL_TOLERANCE = 1.5  # the estimate is noisy: the pass stops at this multiple of target_kl
Losses = dict[str, Array]


class Judgement(NamedTuple):
    """What the policy that made a rollout says of it; flat, [decisions], in the order time·envs + env."""

    log_prob: Array
    value: Array
    advantage: Array
    target: Array  # of the value


class Minibatch(NamedTuple):
    """Some decisions: [batch, ...], or [time, batch, ...] with the memory before the first where there is one."""

    observation: dict[str, Array]
    action: Array
    judgement: Judgement
    is_first: Tensor | None = None
    memory: Tensor | None = None


class PPO(Workflow):
    """Methods appear in the order in which a rollout passes through them."""

    name = "ppo"
    update_hooks = ("update",)

    def __init__(
        self,
        *,
        batch_size: int = 256,  # sequences in a minibatch
        sequence_length: int = 1,  # decisions in a sequence; more than 1 is for a recurrent policy
        discount: float = 0.99,
        lambda_: float = 0.95,
        clip: float = 0.2,
        value_clip: float | None = None,
        entropy_scale: float = 0.0,
        value_scale: float = 0.5,
        target_kl: float | None = None,
        normalize_advantage: bool = True,
        anneal_learning_rate: bool = True,  # linearly to 0 at training.total_timesteps
        anneal_clip: bool = False,
        sample_in_eval: bool = False,
    ) -> None:
        if not 0.0 < clip < 1.0 or not 0.0 <= discount <= 1.0 or not 0.0 <= lambda_ <= 1.0:
            raise ConfigError(f"clip={clip}, discount={discount}, lambda_={lambda_}: all are shares from 0 to 1.")
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.discount, self.lambda_, self.clip, self.value_clip = discount, lambda_, clip, value_clip
        self.entropy_scale, self.value_scale, self.target_kl = entropy_scale, value_scale, target_kl
        self.normalize_advantage, self.sample_in_eval = normalize_advantage, sample_in_eval
        self.anneal_learning_rate, self.anneal_clip = anneal_learning_rate, anneal_clip

    def _bind_context(self, context: WorkflowContext) -> None:
        parts = context.components
        self.encoder = context.component("encoder", nn.Module)
        self._only_key = handed_on(self.encoder)
        self.memory = context.component("memory", GRUMemory) if "memory" in parts else None
        self.observation_normalizer: ObservationNormalizer | None = None
        if "observation_normalizer" in parts:
            self.observation_normalizer = context.component("observation_normalizer", ObservationNormalizer)
        self.reward_normalizer: RewardNormalizer | None = None
        if "reward_normalizer" in parts:
            self.reward_normalizer = context.component("reward_normalizer", RewardNormalizer)
        self.policy = context.controller("policy", Policy)
        self.critic = context.controller("critic", ValueHead)
        self.optimizer = context.optimizer("main", FlatAdam) if context.optimizers else None  # none: it only acts
        self._inference = torch.inference_mode()
        below = [self.encoder] if self.memory is None else [self.encoder, self.memory]
        self._learns_features = any(True for module in below for _ in module.parameters())
        # See rl_lab.nn.arrays: on the CPU, plain networks are run by NumPy.
        heads = (self.policy.head, self.critic.head)
        self._in_numpy = context.device.type == "cpu" and self._only_key is not None and self.memory is None
        self._in_numpy = self._in_numpy and all(head.host is not None for head in heads)
        if self.sequence_length > 1 and self.memory is None:
            raise ConfigError(
                f"workflow.sequence_length={self.sequence_length} is for a recurrent policy. Set it to 1, or take "
                "+experiment=ppo_recurrent, which adds components.memory."
            )
        for name, source in context.data_sources.items():
            if not isinstance(source, StreamSource):
                raise ConfigError(f"data_sources.{name} is a {type(source).__name__}: PPO learns from a StreamSource.")
        self._judged: tuple[int, Judgement] | None = None  # number of the rollout, and what was said of it
        self._flat: tuple[Rollout, Mapping[str, Array]] | None = None  # its observations, ready for the encoder
        self._return_so_far: Tensor | None = None
        self._explained_variance: Array = self._array(torch.zeros((), device=context.device))

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        if self.memory is None:
            return {}
        return {"memory": self.memory.initial(num_envs), "before": self.memory.initial(num_envs)}

    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Draw actions; `eval` takes the likeliest, unless `sample_in_eval`. Values are left for later: see `judge`."""
        with self._inference:
            features = self._encode(self._seen(observation))
            if self.memory is not None:
                features = self.memory.step(features, state["memory"])
                state = {"memory": features, "before": state["memory"]}
            greedy = mode == "eval" and not self.sample_in_eval
            action = as_array(self.policy.choose(self.policy.forward(features), greedy=greedy))
        return action.astype(self.context.action_spec.dtype, copy=False), state

    def _seen(self, observation: Mapping[str, Array]) -> Mapping[str, Array]:
        """Normalised, on the device; arrays where NumPy runs the networks."""
        if not self._in_numpy or self.observation_normalizer is not None:
            observation = {
                key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()
            }
            if self.observation_normalizer is not None:
                observation = self.observation_normalizer(observation)
        return {key: self._array(value) for key, value in observation.items()}

    def _array(self, value: Array) -> Array:
        return as_array(value) if self._in_numpy else value

    def _encode(self, observation: Mapping[str, Array]) -> Array:
        return self.encoder(observation) if self._only_key is None else observation[self._only_key]

    def record_specs(self) -> dict[str, FieldSpec]:
        return {} if self.memory is None else {MEMORY: FieldSpec((self.memory.output_size,), "float32")}

    def record_fields(self, state: AgentState) -> Fields:
        return {MEMORY: state["before"].cpu().numpy()}

    # Judging a rollout ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, rollout: Rollout) -> Judgement:
        """Values, log-probabilities and advantages. No parameter has changed since the rollout's first decision, so one
        pass over it says what a forward at every step would have said."""
        features = self._features(rollout)
        value = self.critic(features)
        action = self._array(rollout.action.flatten(0, 1))
        log_prob = self.policy.evaluate(self.policy(features), action).log_prob
        successors = self._successor_values(rollout, features)
        target = self.returns(rollout, value.reshape(rollout.reward.shape), *successors).reshape(-1)
        advantage = target - value
        self._explained_variance = 1.0 - advantage.var() / (target.var() + 1e-8)
        return Judgement(log_prob, value, advantage, target)

    def _features(self, rollout: Rollout) -> Array:
        """[decisions, size]"""
        features = self._encode(self._observations(rollout))
        if self.memory is None:
            return features
        by_time = features.unflatten(0, rollout.reward.shape)
        return self.memory.scan(by_time, rollout.extras[MEMORY][0], rollout.is_first).flatten(0, 1)

    def _observations(self, rollout: Rollout) -> Mapping[str, Array]:
        """Flat and normalised, with the statistics that the rollout was collected with."""
        if self._flat is None or self._flat[0] is not rollout:
            flat = {key: value.flatten(0, 1) for key, value in rollout.observation.items()}
            with torch.no_grad():
                self._flat = (rollout, self._seen(flat))
        return self._flat[1]

    def _successor_values(self, rollout: Rollout, features: Array) -> tuple[Array, Array]:
        """[env] of what came after the last decision; [cuts] of the true last observations of truncated episodes."""
        envs, keys = len(rollout.following_first), rollout.following
        seen = self._encode(self._seen({key: torch.cat([keys[key], rollout.cut[key]]) for key in keys}))
        if self.memory is not None:
            keep = (~rollout.following_first).to(features.dtype).unsqueeze(-1)
            seen = self.memory.step(seen, torch.cat([features[-envs:] * keep, features[rollout.cut_indices]]))
        values = self.critic(seen)
        return values[:envs], values[envs:]

    def returns(self, rollout: Rollout, value: Array, following: Array, cut: Array) -> Array:
        """The value targets of GAE(λ), [time, env]. A truncated episode goes on in the value of its last observation, a
        terminated one is worth nothing beyond its end, and neither looks into the episode that came next."""
        next_value = library(value).concatenate([value[1:], following[None]])
        next_value.reshape(-1)[self._array(rollout.cut_indices)] = cut
        live = (1.0 - flags(self._array(rollout.is_terminal))) * self.discount
        mix = (1.0 - flags(self._array(rollout.is_last))) * self.lambda_
        return recursive_returns(self._array(self._scaled_reward(rollout)), live, next_value, mix, following, dim=0)

    def _scaled_reward(self, rollout: Rollout) -> Tensor:
        if self.reward_normalizer is None:
            return rollout.reward
        before = self._return_so_far if self._return_so_far is not None else torch.zeros_like(rollout.reward[0])
        self._return_so_far = self.reward_normalizer.track(rollout.reward, rollout.is_last, before)
        return self.reward_normalizer(rollout.reward)

    # Learning from it -------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, self.sequence_length, device=str(self.context.device))

    def update(self, batch: RolloutBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step; none, and the end of this rollout, where the policy has moved too far already."""
        assert self.optimizer is not None
        losses, backward, metrics = self.losses(self._minibatch(batch))
        stop = self.target_kl is not None and bool(metrics["policy/kl"] > KL_TOLERANCE * self.target_kl)
        if not stop:
            if self.anneal_learning_rate:
                self.optimizer.set_learning_rate(self.optimizer.defaults["lr"] * self._share_left())
            self.optimizer.zero_grad()
            backward()
            self.optimizer.step(loss=losses["total"])
        if stop and not batch.is_final:
            source = self.context.data_sources[phase.data_source or ""]
            assert isinstance(source, StreamSource)
            source.drop()
        if (stop or batch.is_final) and self.observation_normalizer is not None:
            self.observation_normalizer.update(batch.rollout.observation)  # takes effect with the next rollout
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()}
        metrics |= {f"optimizer/{name}": value for name, value in self.optimizer.metrics().items()}
        return pack(metrics | {"value/explained_variance": self._explained_variance})

    def _share_left(self) -> float:
        """Of the run's env steps; 1 at the start, 0 at the end."""
        total = self.context.config.get("training", {}).get("total_timesteps")
        if total is None or self.context.train_envs is None:
            return 1.0
        return max(0.0, 1.0 - self._decisions * self.context.train_envs.num_envs / total)

    def _minibatch(self, batch: RolloutBatch) -> Minibatch:
        rollout, observations = batch.rollout, self._observations(batch.rollout)
        if self._judged is None or self._judged[0] != rollout.number:
            self._judged = (rollout.number, self.judge(rollout))
        action, judgement = rollout.action.flatten(0, 1), self._judged[1]
        if self._in_numpy:
            rows = batch.indices.numpy().ravel()
            *judged, taken = (part.take(rows, 0) for part in (*judgement, action.numpy()))
            return Minibatch(
                {key: value.take(rows, 0) for key, value in observations.items()}, taken, Judgement(*judged)
            )
        chosen, memory = batch.indices.flatten(), None
        if self.memory is not None:
            chosen = batch.indices.t()  # time first
            memory = rollout.extras[MEMORY].flatten(0, 1)[chosen[0]]
        return Minibatch(
            {key: value[chosen] for key, value in observations.items()},
            action[chosen],
            Judgement(*(part[chosen] for part in judgement)),
            rollout.is_first.flatten()[chosen],
            memory,
        )

    @torch.no_grad()
    def losses(self, data: Minibatch) -> tuple[Losses, Callable[[], None], dict[str, Array]]:
        """The clipped objective, the value's error and minus the entropy, unscaled, and their total; its backward pass;
        values to watch.

        The derivatives by what the heads put out are known in closed form. So that autograd need not find them, they
        are written out beside each loss.
        """
        (params, value), backward = run_heads(self._learned_features(data), self.policy.head, self.critic.head)
        policy, old, count = (
            self.policy.evaluate(params, data.action),
            data.judgement,
            len(data.judgement.value.reshape(-1)),
        )
        policy_loss, by_log_prob, metrics = self.policy_loss(policy.log_prob, old)
        value_loss, by_value = squared_error(value[..., 0], old.target, old.value, self.value_clip)
        losses = {"policy": policy_loss, "value": value_loss, "entropy": -mean(policy.entropy)}
        losses["total"] = policy_loss + self.value_scale * value_loss + self.entropy_scale * losses["entropy"]

        def into_parameters() -> None:
            by_params = policy.backward(by_log_prob, -self.entropy_scale / count)
            backward(by_params, self.value_scale * by_value[..., None])

        return losses, into_parameters, metrics

    def _learned_features(self, data: Minibatch) -> Array:
        """With a graph where something below the heads is trained."""
        if not self._learns_features:
            return self._encode(data.observation)
        with torch.enable_grad():
            features = self._encode(data.observation)
            if self.memory is not None and data.memory is not None and data.is_first is not None:
                features = self.memory.scan(features, data.memory, data.is_first)
        return features

    def policy_loss(self, log_prob: Array, old: Judgement) -> tuple[Array, Array, dict[str, Array]]:
        """-min(ratio·A, clip(ratio)·A): nothing is gained by leaving the trust region. Its derivative; metrics."""
        clip = self.clip * self._share_left() if self.anneal_clip else self.clip
        advantage = old.advantage
        count = len(advantage.reshape(-1))
        if self.normalize_advantage and count > 1:
            centred = advantage - mean(advantage)
            advantage = centred / ((mean(centred * centred) * (count / (count - 1))) ** 0.5 + 1e-8)
        log_ratio = log_prob - old.log_prob
        loss, slope, ratio = clipped_surrogate(log_ratio, advantage, clip)
        excess = ratio - 1.0
        metrics = {"kl": mean(excess - log_ratio), "clipped": mean(flags(abs(excess) > clip))}
        return loss, slope, {f"policy/{name}": value for name, value in metrics.items()}

    def batch_losses(self, batch: RolloutBatch) -> Losses:
        losses = self.losses(self._minibatch(batch))[0]
        return {name: losses[name] for name in ("policy", "value", "entropy")}

    # Saving -----------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        if state:
            state["return_so_far"] = self._return_so_far
            state["explained_variance"] = torch.as_tensor(self._explained_variance)
            state["judged"] = None if self._judged is None else [self._judged[0], *map(as_tensor, self._judged[1])]
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if not state or self.context.train_envs is None:
            return
        device, before = self.context.device, state["return_so_far"]
        self._return_so_far = None if before is None else before.to(device)
        self._explained_variance = self._array(state["explained_variance"].to(device))
        self._judged, self._flat = None, None
        if state["judged"] is not None:
            number, *parts = state["judged"]
            self._judged = (number, Judgement(*(self._array(part.to(device)) for part in parts)))

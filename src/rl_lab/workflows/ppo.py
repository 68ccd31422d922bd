"""PPO (Schulman et al., 2017), with the details that its implementations agree on.

The policy collects a rollout and estimates its advantages once. Then several passes over it, in shuffled minibatches,
each take one gradient step on the clipped objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab import ranks
from rl_lab.components.actions import mask_illegal
from rl_lab.components.actors.action_distributions import ActionDistribution
from rl_lab.components.actors.ppo import Policy, ValueHead
from rl_lab.components.memories import GRUMemory
from rl_lab.components.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.data_sources.stream import StreamSource
from rl_lab.errors import ConfigError
from rl_lab.losses.policy_gradient import clipped_surrogate, gae, kl_estimate, normalize, value_loss
from rl_lab.metrics.values import Metrics, pack
from rl_lab.nn.optimizers import gradient_step, scale_learning_rate
from rl_lab.records import BatchSpec, Fields, FieldSpec, Observation, Rollout, RolloutBatch, SequenceBatch
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

MEMORY = "memory"  # the stored field with the state of a recurrent policy before each decision
KL_TOLERANCE = 1.5  # the estimate is noisy: the pass stops at this multiple of target_kl
Losses = dict[str, Tensor]


class Estimates(NamedTuple):
    """A rollout under the policy and value function that collected it: [decisions], in the order time·envs + env."""

    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor  # of the value


class Minibatch(NamedTuple):
    """Some decisions of a rollout: [batch, ...], or [time, batch, ...] for a recurrent policy."""

    observation: dict[str, Tensor]
    action: Tensor
    old: Estimates
    is_first: Tensor | None = None
    memory: Tensor | None = None  # [batch, units] before the first decision


class Prediction(NamedTuple):
    """A minibatch under the present policy and value function; shaped as its decisions."""

    log_ratio: Tensor  # log π(a|s) - log π_old(a|s)
    entropy: Tensor
    value: Tensor


class PPO(Workflow):
    """Methods appear in the order in which a rollout passes through them."""

    name = "ppo"
    data_parallel = True
    env_entries = (*Workflow.env_entries, "running_return")
    update_hooks = ("update",)
    named_hooks = ("distill", "clone")

    def __init__(
        self,
        *,
        batch_size: int,  # sequences in a minibatch
        sequence_length: int,  # decisions in a sequence; more than 1 is for a recurrent policy
        discount: float,
        lambda_: float,
        clip: float,
        value_clip: float | None,
        entropy_scale: float,
        value_scale: float,
        target_kl: float | None,
        normalize_advantage: bool,
        anneal_learning_rate: bool,  # linearly to 0 at training.total_timesteps
        anneal_clip: bool,
        sample_in_eval: bool,
    ) -> None:
        if not 0.0 < clip < 1.0 or not 0.0 <= discount <= 1.0 or not 0.0 <= lambda_ <= 1.0:
            raise ConfigError(f"clip={clip}, discount={discount}, lambda_={lambda_}: all are shares from 0 to 1.")
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.discount, self.lambda_, self.clip, self.value_clip = discount, lambda_, clip, value_clip
        self.loss_scales = {"policy": 1.0, "value": value_scale, "entropy": entropy_scale}
        self.normalize_advantage, self.target_kl, self.sample_in_eval = normalize_advantage, target_kl, sample_in_eval
        self.anneal_learning_rate, self.anneal_clip = anneal_learning_rate, anneal_clip

    def _bind_context(self, context: WorkflowContext) -> None:
        parts = context.components
        self.encoder = context.component("encoder", nn.Module)
        self.memory = context.component("memory", GRUMemory) if "memory" in parts else None
        self.observation_normalizer: ObservationNormalizer | None = None
        if "observation_normalizer" in parts:
            self.observation_normalizer = context.component("observation_normalizer", ObservationNormalizer)
        self.reward_normalizer: RewardNormalizer | None = None
        if "reward_normalizer" in parts:
            self.reward_normalizer = context.component("reward_normalizer", RewardNormalizer)
        self.policy = context.controller("policy", Policy)
        self.critic = context.controller("critic", ValueHead)
        # A run that is loaded to act has no optimiser.
        self.optimizer = context.optimizer("main", torch.optim.Optimizer) if context.optimizers else None
        if self.sequence_length > 1 and self.memory is None:
            raise ConfigError(
                f"workflow.sequence_length={self.sequence_length} is for a recurrent policy. Set it to 1, or take "
                "+experiment=ppo_recurrent, which adds components.memory."
            )
        for name, source in context.data_sources.items():
            if not isinstance(source, StreamSource) and not source.prefilled:  # a dataset is for `clone`
                raise ConfigError(f"data_sources.{name} is a {type(source).__name__}: PPO learns from a StreamSource.")
        self._estimates: tuple[int, Estimates] | None = None  # number of the rollout, and its estimates
        self._seen: tuple[Rollout, dict[str, Tensor]] | None = None  # a rollout, and its observations in flat form
        self._running_return: Tensor | None = None  # [env] discounted, for the scale of rewards
        self._explained_variance = torch.zeros((), device=context.device)

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        if self.memory is None:
            return {}
        return {"memory": self.memory.initial(num_envs), "before": self.memory.initial(num_envs)}

    @torch.inference_mode()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Draw actions; `eval` takes the likeliest, unless `sample_in_eval`. Values are computed later: `estimate`."""
        device = self.context.device
        seen = self._normalized({key: torch.as_tensor(value, device=device) for key, value in observation.items()})
        features = self.encoder(seen)
        if self.memory is not None:
            features = self.memory.step(features, state["memory"])
            state = {"memory": features, "before": state["memory"]}
        policy = self._policy_at(features, seen)
        action = policy.mode() if mode == "eval" and not self.sample_in_eval else policy.sample()
        return action.cpu().numpy().astype(self.context.action_spec.dtype, copy=False), state

    def _policy_at(self, features: Tensor, observation: Mapping[str, Tensor]) -> ActionDistribution:
        params = mask_illegal(self.policy(features), observation, self.context.action_spec)
        return self.policy.distribution(params)

    def _normalized(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.observation_normalizer is None:
            return observation
        mask = self.context.action_spec.mask  # it stays what it is
        return self.observation_normalizer(observation) | ({} if mask is None else {mask: observation[mask]})

    def record_specs(self) -> dict[str, FieldSpec]:
        return {} if self.memory is None else {MEMORY: FieldSpec((self.memory.output_size,), "float32")}

    def record_fields(self, state: AgentState) -> Fields:
        return {MEMORY: state["before"].cpu().numpy()}

    # Advantages -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def estimate(self, rollout: Rollout) -> Estimates:
        """Log-probabilities, values and advantages of a rollout. No parameter has changed since its first decision, so
        one pass gives what a forward pass at each step would have given."""
        features = self._features(rollout)
        log_prob = self._policy_at(features, self._observations(rollout)).log_prob(rollout.action.flatten(0, 1))
        value = self.critic(features)
        next_value = self._next_values(rollout, features, value.view_as(rollout.reward))
        advantage, target = self.advantages(rollout, value.view_as(rollout.reward), next_value)
        self._explained_variance = 1.0 - advantage.var() / (target.var() + 1e-8)
        return Estimates(log_prob, value, advantage.flatten(), target.flatten())

    def advantages(self, rollout: Rollout, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and value targets by GAE(λ), [time, env]."""
        discount = self.discount * (1.0 - rollout.is_terminal.float())
        lambda_ = self.lambda_ * (1.0 - rollout.is_last.float())
        return gae(self._scaled_reward(rollout), discount, value, next_value, lambda_)

    def _features(self, rollout: Rollout) -> Tensor:
        """[decisions, size]"""
        features = self.encoder(self._observations(rollout))
        if self.memory is None:
            return features
        by_time = features.unflatten(0, rollout.reward.shape)
        return self.memory.scan(by_time, rollout.extras[MEMORY][0], rollout.is_first).flatten(0, 1)

    def _observations(self, rollout: Rollout) -> dict[str, Tensor]:
        """[decisions, ...], normalised with the statistics that the rollout was collected with."""
        if self._seen is None or self._seen[0] is not rollout:
            flat = {key: value.flatten(0, 1) for key, value in rollout.observation.items()}
            self._seen = (rollout, self._normalized(flat))
        return self._seen[1]

    def _next_values(self, rollout: Rollout, features: Tensor, value: Tensor) -> Tensor:
        """Values of what followed each decision, [time, env]: the next observation, or the true last observation of an
        episode that was truncated."""
        envs, keys = len(rollout.following_first), rollout.following
        later = self.encoder(self._normalized({key: torch.cat([keys[key], rollout.cut[key]]) for key in keys}))
        if self.memory is not None:
            keep = (~rollout.following_first).to(features.dtype).unsqueeze(-1)
            later = self.memory.step(later, torch.cat([features[-envs:] * keep, features[rollout.cut_indices]]))
        following, cut = self.critic(later).tensor_split([envs])
        next_value = torch.cat([value[1:], following[None]])
        next_value.view(-1)[rollout.cut_indices] = cut
        return next_value

    def _scaled_reward(self, rollout: Rollout) -> Tensor:
        if self.reward_normalizer is None:
            return rollout.reward
        before = self._running_return if self._running_return is not None else torch.zeros_like(rollout.reward[0])
        self._running_return = self.reward_normalizer.track(rollout.reward, rollout.is_last, before)
        return self.reward_normalizer(rollout.reward)

    # The update -------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, self.sequence_length, device=str(self.context.device))

    def update(self, batch: RolloutBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step; none, and the end of this rollout, where the policy has moved too far already."""
        assert self.optimizer is not None
        if not isinstance(batch, RolloutBatch):
            raise ConfigError(f"phase '{phase.name}': PPO's update needs a StreamSource; a dataset is for `clone`.")
        data = self._minibatch(batch)
        prediction = self.predict(data)
        losses = self.losses(prediction, data)
        total = torch.stack([self.loss_scales.get(name, 1.0) * loss for name, loss in losses.items()]).sum()
        metrics = self._policy_metrics(prediction.log_ratio.detach())
        stop = self.target_kl is not None and bool(ranks.average(metrics["policy/kl"]) > KL_TOLERANCE * self.target_kl)
        if not stop:
            if self.anneal_learning_rate:
                scale_learning_rate(self.optimizer, self._share_left())
            step = gradient_step(self.optimizer, total)
            metrics |= {f"optimizer/{name}": value for name, value in step.items()}
        elif not batch.is_final:
            source = self.context.data_sources[phase.data_source or ""]
            assert isinstance(source, StreamSource)
            source.drop()
        if (stop or batch.is_final) and self.observation_normalizer is not None:
            self.observation_normalizer.update(batch.rollout.observation)  # takes effect with the next rollout
        metrics |= {f"loss/{name}": loss.detach() for name, loss in losses.items()}
        return pack(metrics | {"loss/total": total.detach(), "value/explained_variance": self._explained_variance})

    def clone(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step of the policy towards the actions of a dataset, -ln π(a | o): behaviour cloning, before it
        learns from its own rollouts. An episode's last record has no action."""
        if self.memory is not None:
            raise ConfigError("clone: a policy with components.memory cannot be cloned. Use +experiment=bc.")
        assert self.optimizer is not None
        if self.observation_normalizer is not None:
            self.observation_normalizer.update(batch.observation)
        seen = self._normalized(dict(batch.observation))
        log_prob = self._policy_at(self.encoder(seen), seen).log_prob(batch.action)
        decided = (~batch.is_last).float()
        loss = -(decided * log_prob).sum() / decided.sum().clamp(min=1.0)
        step = gradient_step(self.optimizer, loss)
        return pack({"loss/clone": loss.detach()} | {f"optimizer/{name}": value for name, value in step.items()})

    def predict(self, data: Minibatch) -> Prediction:
        """Log-ratios, entropies and values of a minibatch, with gradient."""
        features = self.encoder(data.observation)
        if self.memory is not None:
            assert data.memory is not None
            assert data.is_first is not None
            features = self.memory.scan(features, data.memory, data.is_first)
        policy = self._policy_at(features, data.observation)
        return Prediction(policy.log_prob(data.action) - data.old.log_prob, policy.entropy(), self.critic(features))

    def losses(self, prediction: Prediction, data: Minibatch) -> Losses:
        """Terms of the objective by name; the update adds them up with the weights in `loss_scales` (1 without one)."""
        old = data.old
        advantage = normalize(old.advantage) if self.normalize_advantage else old.advantage
        return {
            "policy": clipped_surrogate(prediction.log_ratio, advantage, self._clip_range()),
            "value": value_loss(prediction.value, old.target, old.value, self.value_clip),
            "entropy": -prediction.entropy.mean(),
        }

    def _clip_range(self) -> float:
        return self.clip * self._share_left() if self.anneal_clip else self.clip

    def _policy_metrics(self, log_ratio: Tensor) -> dict[str, Tensor]:
        clipped = (log_ratio.expm1().abs() > self._clip_range()).float().mean()
        return {"policy/kl": kl_estimate(log_ratio), "policy/clipped": clipped}

    def _share_left(self) -> float:
        """The share of the run's env steps that is left: 1 at the start, 0 at the end."""
        total = self.context.config.get("training", {}).get("total_timesteps")
        if total is None or self.context.train_envs is None:
            return 1.0
        return max(0.0, 1.0 - self._decisions * self.context.train_envs.num_envs * ranks.count() / total)

    def batch_losses(self, batch: RolloutBatch) -> Losses:
        data = self._minibatch(batch)
        return self.losses(self.predict(data), data)

    # Minibatches ------------------------------------------------------------------------------------------------------

    def _minibatch(self, batch: RolloutBatch) -> Minibatch:
        rollout = batch.rollout
        if self._estimates is None or self._estimates[0] != rollout.number:
            self._estimates = (rollout.number, self.estimate(rollout))
        observation, action, old = self._observations(rollout), rollout.action.flatten(0, 1), self._estimates[1]
        if self.memory is None:
            rows = batch.indices.flatten()
            return Minibatch(
                {key: value.index_select(0, rows) for key, value in observation.items()},
                action.index_select(0, rows),
                Estimates(*(part.index_select(0, rows) for part in old)),
            )
        rows = batch.indices.t()  # time first
        return Minibatch(
            {key: value[rows] for key, value in observation.items()},
            action[rows],
            Estimates(*(part[rows] for part in old)),
            rollout.is_first.flatten()[rows],
            rollout.extras[MEMORY].flatten(0, 1)[rows[0]],
        )

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state:
            state["running_return"] = self._running_return
            state["explained_variance"] = self._explained_variance
            state["estimates"] = None if self._estimates is None else [self._estimates[0], *self._estimates[1]]
        return state

    def dealt_state(self, states: Sequence[dict[str, Any]], own: slice) -> dict[str, Any]:
        return super().dealt_state(states, own) | {"estimates": None}  # of a rollout that is given up

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not state or self.context.train_envs is None:
            return
        device, before = self.context.device, state["running_return"]
        self._running_return = None if before is None else before.to(device)
        self._explained_variance = state["explained_variance"].to(device)
        self._estimates, self._seen = None, None
        if state["estimates"] is not None:
            number, *parts = state["estimates"]
            self._estimates = (number, Estimates(*(part.to(device) for part in parts)))

"""PPO (Schulman et al., 2017), with the details that its implementations agree on.

A rollout of fresh decisions is judged once: values, log-probabilities and advantages under the policy that made it.
Then it is passed over several times in shuffled minibatches, each one gradient step on the clipped objective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.controllers.policies import Policy, ValueHead
from rl_lab.components.memories import GRUMemory
from rl_lab.components.normalizers import ObservationNormalizer, RewardNormalizer
from rl_lab.components.objectives import clipped_surrogate
from rl_lab.components.return_computers import recursive_returns
from rl_lab.data_sources.stream import StreamSource
from rl_lab.errors import ConfigError
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.nn.orthogonal import run_heads
from rl_lab.records import BatchSpec, Fields, FieldSpec, Observation, Rollout, RolloutBatch
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import PhaseView, WorkflowContext

MEMORY = "memory"  # the field that keeps what a recurrent policy remembered before each decision
KL_TOLERANCE = 1.5  # the estimate is noisy: the pass stops at this multiple of target_kl
Losses = dict[str, Tensor]


class Judgement(NamedTuple):
    """What the policy that made a rollout says of it; flat, [decisions], in the order time·envs + env."""

    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor  # of the value


class Minibatch(NamedTuple):
    """Some decisions: [batch, ...], or [time, batch, ...] with the memory before the first where there is one."""

    observation: dict[str, Tensor]
    action: Tensor
    judgement: Judgement
    is_first: Tensor
    memory: Tensor | None


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
        if self.sequence_length > 1 and self.memory is None:
            raise ConfigError(
                f"workflow.sequence_length={self.sequence_length} is for a recurrent policy. Set it to 1, or take "
                "+experiment=ppo_recurrent, which adds components.memory."
            )
        for name, source in context.data_sources.items():
            if not isinstance(source, StreamSource):
                raise ConfigError(f"data_sources.{name} is a {type(source).__name__}: PPO learns from a StreamSource.")
        self._judged: tuple[int, Judgement] | None = None  # number of the rollout, and what was said of it
        self._flat: tuple[Rollout, dict[str, Tensor]] | None = None  # its observations, ready for the encoder
        self._return_so_far: Tensor | None = None
        self._explained_variance = torch.zeros((), device=context.device)

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        if self.memory is None:
            return {}
        return {"memory": self.memory.initial(num_envs), "before": self.memory.initial(num_envs)}

    @torch.inference_mode()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        """Draw actions; `eval` takes the likeliest, unless `sample_in_eval`. Values are left for later: see `judge`."""
        device = self.context.device
        seen = {key: torch.from_numpy(value).to(device) for key, value in observation.items()}
        features = self.encoder(self._normalized(seen))
        if self.memory is not None:
            features = self.memory.step(features, state["memory"])
            state = {"memory": features, "before": state["memory"]}
        greedy = mode == "eval" and not self.sample_in_eval
        return self.policy.choose(self.policy(features), greedy=greedy).cpu().numpy(), state

    def _normalized(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        return observation if self.observation_normalizer is None else self.observation_normalizer(observation)

    def record_specs(self) -> dict[str, FieldSpec]:
        return {} if self.memory is None else {MEMORY: FieldSpec((self.memory.output_size,), "float32")}

    def record_fields(self, state: AgentState) -> Fields:
        return {MEMORY: state["before"].cpu().numpy()}

    # Judging a rollout ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, rollout: Rollout) -> Judgement:
        """Values, log-probabilities and advantages. No parameter has changed since the rollout's first decision, so one
        pass over it says what a forward at every step would have said."""
        lead = rollout.reward.shape
        features = self._features(rollout)
        value = self.critic(features)
        log_prob, _ = self.policy.evaluate(self.policy(features), rollout.action.flatten(0, 1))
        target = self.returns(rollout, value.view(lead), *self._successor_values(rollout, features))
        advantage = target.flatten() - value
        self._explained_variance = 1.0 - advantage.var() / target.var().clamp(min=1e-8)
        return Judgement(log_prob, value, advantage, target.flatten())

    def _features(self, rollout: Rollout) -> Float[Tensor, "decisions size"]:
        features = self.encoder(self._observations(rollout))
        if self.memory is None:
            return features
        by_time = features.unflatten(0, rollout.reward.shape)
        return self.memory.scan(by_time, rollout.extras[MEMORY][0], rollout.is_first).flatten(0, 1)

    def _observations(self, rollout: Rollout) -> dict[str, Tensor]:
        """Flat and normalised, with the statistics that the rollout was collected with."""
        if self._flat is None or self._flat[0] is not rollout:
            flat = {key: value.flatten(0, 1) for key, value in rollout.observation.items()}
            with torch.no_grad():
                self._flat = (rollout, self._normalized(flat))
        return self._flat[1]

    def _successor_values(self, rollout: Rollout, features: Tensor) -> tuple[Tensor, Tensor]:
        """[env] of what came after the last decision; [cuts] of the true last observations of truncated episodes."""
        envs = len(rollout.following_first)
        keys = rollout.following
        seen = self.encoder(self._normalized({key: torch.cat([keys[key], rollout.cut[key]]) for key in keys}))
        if self.memory is not None:
            keep = (~rollout.following_first).to(features.dtype).unsqueeze(-1)
            seen = self.memory.step(seen, torch.cat([features[-envs:] * keep, features[rollout.cut_indices]]))
        following, cut = self.critic(seen).split([envs, len(rollout.cut_indices)])
        return following, cut

    def returns(self, rollout: Rollout, value: Tensor, following: Tensor, cut: Tensor) -> Float[Tensor, "time env"]:
        """The value targets of GAE(λ). A truncated episode goes on in the value of its last observation, a terminated
        one is worth nothing beyond its end, and neither looks into the episode that came next."""
        reward = self._scaled_reward(rollout)
        next_value = torch.cat([value[1:], following.unsqueeze(0)])
        next_value.view(-1)[rollout.cut_indices] = cut
        live = (1.0 - rollout.is_terminal.to(reward.dtype)) * self.discount
        mix = (1.0 - rollout.is_last.to(reward.dtype)) * self.lambda_
        return recursive_returns(reward, live, next_value, mix, following, dim=0)

    def _scaled_reward(self, rollout: Rollout) -> Tensor:
        if self.reward_normalizer is None:
            return rollout.reward
        before = self._return_so_far if self._return_so_far is not None else torch.zeros_like(rollout.reward[0])
        self._return_so_far = self.reward_normalizer.track(rollout.reward, rollout.is_last, before)
        return self.reward_normalizer(rollout.reward)

    # Learning from it -------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        return BatchSpec(self.batch_size, self.sequence_length, device=str(self.context.device))

    def update(self, batch: RolloutBatch, *, phase: PhaseView) -> TensorMetrics:
        """One gradient step; none, and the end of this rollout, where the policy has moved too far already."""
        assert self.optimizer is not None
        losses, metrics = self.losses(self._minibatch(batch))
        losses["total"] = losses["policy"] + self.value_scale * losses["value"]
        if self.entropy_scale:
            losses["total"] = losses["total"] + self.entropy_scale * losses["entropy"]
        stop = self.target_kl is not None and bool(metrics["policy/kl"] > KL_TOLERANCE * self.target_kl)
        if not stop:
            self._step(losses["total"])
        if stop and not batch.is_final:
            source = self.context.data_sources[phase.data_source or ""]
            assert isinstance(source, StreamSource)
            source.drop()
        if (stop or batch.is_final) and self.observation_normalizer is not None:
            self.observation_normalizer.update(batch.rollout.observation)  # takes effect with the next rollout
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()}
        metrics |= {f"optimizer/{name}": value for name, value in self.optimizer.metrics().items()}
        return TensorMetrics.pack(metrics | {"value/explained_variance": self._explained_variance})

    def _step(self, total: Tensor) -> None:
        assert self.optimizer is not None
        if self.anneal_learning_rate:
            self.optimizer.set_learning_rate(self.optimizer.defaults["lr"] * self._share_left())
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step(loss=total)

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
        chosen, memory, shape = batch.indices.flatten(), None, None
        if self.memory is not None:
            memory = rollout.extras[MEMORY].flatten(0, 1)[batch.indices[:, 0]]
            chosen, shape = batch.indices.t().flatten(), batch.indices.t().shape
        parts = [rollout.action.flatten(0, 1), rollout.is_first.flatten(), *self._judged[1]]
        parts = [part.index_select(0, chosen) for part in (*parts, *observations.values())]
        if shape is not None:
            parts = [part.unflatten(0, shape) for part in parts]
        action, is_first, *rest = parts
        judgement, seen = Judgement(*rest[:4]), dict(zip(observations, rest[4:], strict=True))
        return Minibatch(seen, action, judgement, is_first, memory)

    def losses(self, data: Minibatch) -> tuple[Losses, dict[str, Tensor]]:
        """The clipped objective, the value's error and minus the entropy, unscaled; values to watch."""
        features = self.encoder(data.observation)
        if self.memory is not None and data.memory is not None:
            features = self.memory.scan(features, data.memory, data.is_first)
        params, value = run_heads(features, self.policy.head, self.critic.head)
        log_prob, entropy = self.policy.evaluate(params, data.action)
        policy_loss, metrics = self.policy_loss(log_prob, data.judgement)
        value_loss = self.value_loss(value.squeeze(-1), data.judgement)
        entropy = entropy if self.entropy_scale else entropy.detach()
        return {"policy": policy_loss, "value": value_loss, "entropy": -entropy.mean()}, metrics

    def policy_loss(self, log_prob: Tensor, old: Judgement) -> tuple[Tensor, dict[str, Tensor]]:
        """-min(ratio·A, clip(ratio)·A): nothing is gained by leaving the trust region."""
        clip = self.clip * self._share_left() if self.anneal_clip else self.clip
        advantage = old.advantage
        if self.normalize_advantage and advantage.numel() > 1:
            std, mean = torch.std_mean(advantage)
            advantage = (advantage - mean) / (std + 1e-8)
        log_ratio = log_prob - old.log_prob
        loss, ratio = clipped_surrogate(log_ratio, advantage, clip)
        excess = ratio - 1.0
        metrics = {"kl": (excess - log_ratio.detach()).mean(), "clipped": (excess.abs() > clip).float().mean()}
        return loss, {f"policy/{name}": value for name, value in metrics.items()}

    def value_loss(self, value: Tensor, old: Judgement) -> Tensor:
        """The squared error; with `value_clip`, the worse of it and that of a value that moved only so far."""
        error = (value - old.target).square()
        if self.value_clip is not None:
            near = old.value + (value - old.value).clamp(-self.value_clip, self.value_clip)
            error = torch.maximum(error, (near - old.target).square())
        return error.mean()

    def batch_losses(self, batch: RolloutBatch) -> Losses:
        return self.losses(self._minibatch(batch))[0]

    # Saving -----------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        if state:
            state["return_so_far"] = self._return_so_far
            state["explained_variance"] = self._explained_variance
            state["judged"] = None if self._judged is None else [self._judged[0], *self._judged[1]]
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if not state or self.context.train_envs is None:
            return
        device, before = self.context.device, state["return_so_far"]
        self._return_so_far = None if before is None else before.to(device)
        self._explained_variance = state["explained_variance"].to(device)
        self._judged, self._flat = None, None
        if state["judged"] is not None:
            number, *parts = state["judged"]
            self._judged = (number, Judgement(*(part.to(device) for part in parts)))

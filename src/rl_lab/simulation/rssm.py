"""A latent world model to plan in: PlaNet's, or that of any Dreamer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.world_models.base import LatentState, StateSpaceModel, stack_states
from rl_lab.errors import ConfigError
from rl_lab.kernels.copies import WorkingCopies
from rl_lab.kernels.graphs import compile_block
from rl_lab.simulation.simulator import Evaluation, SimulatedStep, Simulator, discounted

FromFeatures = Callable[[Tensor], Tensor]


class RSSMSimulator(Simulator):
    """Steps the prior of a state-space model; its state is a `LatentState`.

    Reward and continuation are read off the state that an action leads to. Latents are sampled, one sample a row.
    `value`, `policy` and `logits` (of a policy over one discrete action) take features [rows, size], where the run has
    such networks.

    Observations are filtered by `rssm` and plans computed by `planned`, which is a copy where plans have weights of
    their own.
    """

    has_temperature = True

    def __init__(
        self,
        *,
        rssm: StateSpaceModel,
        reward: RewardPredictor,
        action_size: int,  # encoded
        encode: Callable[[Mapping[str, Tensor]], Tensor] | nn.Module | None = None,
        continuation: ContinuePredictor | None = None,
        value: FromFeatures | None = None,
        value_includes_reward: bool = False,  # whether V(s) begins with the reward of s itself
        policy: FromFeatures | None = None,
        logits: FromFeatures | None = None,
        discount: float = 1.0,  # that the values were learned with
    ) -> None:
        self.discount, self.value_includes_reward = discount, value_includes_reward
        self.rssm, self.reward, self.encode, self.continuation = rssm, reward, encode, continuation
        self.has_surprise = encode is not None
        self.action_size = action_size
        self._value, self._policy, self._logits = value, policy, logits
        self.has_value, self.has_policy, self.has_logits = value is not None, policy is not None, logits is not None
        self.planned = rssm
        self._copies: WorkingCopies | None = None
        self._autocast: Callable[[], AbstractContextManager] = nullcontext

    def compile_blocks(self, dtype: torch.dtype | None = None) -> None:
        """Compile one step of the model. The plain methods stay the reference. `dtype`: plans are computed with copies
        of the weights of this type, which `observe` renews."""
        if dtype is not None:
            copies = self._copies = WorkingCopies(dtype)
            self.planned, self.reward = copies.add(self.rssm), copies.add(self.reward)
            self.continuation = None if self.continuation is None else copies.add(self.continuation)
            device = next(self.planned.parameters()).device.type
            self._autocast = lambda: torch.autocast(device, dtype)
        for name in ("_predict", "_outcome"):
            setattr(self, name, compile_block(getattr(self, name)))

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: LatentState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> LatentState:
        """Filter the observation into the latent state before it; zeros where there is none."""
        if self.encode is None:
            raise ConfigError("This RSSMSimulator has no encoder: give it one, or start from a latent state.")
        if self._copies is not None:
            self._copies.refresh()
        embed = self.encode(observation)
        state = self.rssm.initial(embed.shape[0]) if previous is None else previous
        if action is None:
            action = embed.new_zeros(embed.shape[0], self.action_size)
        if is_first is not None:
            keep = (~is_first).to(embed.dtype)
            state = state.map(lambda part: part * keep.view(-1, *[1] * (part.ndim - 1)).to(part.dtype))
            action = action * keep[:, None]
        return self.rssm.observe_step(state, action.to(embed.dtype), embed)[0]

    def step(self, state: LatentState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        with self._autocast():
            noise = self._tempered(self.rssm.draw_noise(action.shape[:1], action.device))
            state = self._predict(state, action, noise)
            return SimulatedStep(state, *self._outcome(state))

    def _tempered(self, noise: Tensor) -> Tensor:
        """Noise that draws from p^(1/temperature): z = argmax p / e with e exponential, or mean + deviation · e."""
        if self.temperature == 1.0:
            return noise
        return noise * self.temperature if self.rssm.noise == "normal" else noise.pow(self.temperature)

    def surprise(self, state: LatentState, observation: Mapping[str, Tensor]) -> Float[Tensor, " batch"]:
        if self.encode is None:
            return super().surprise(state, observation)
        rssm = self.rssm
        seen = rssm.distribution(rssm.posterior(state.deter, self.encode(observation)))
        return rssm.divergence(seen, rssm.distribution(rssm.prior(state.deter)))

    def _predict(self, state: LatentState, action: Tensor, noise: Tensor) -> LatentState:
        return self.planned.predict_step(state, action.to(state.deter.dtype), noise)

    def _outcome(self, state: LatentState) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Reward and continuation on arriving at a state."""
        features = state.features
        reward = self.reward.mean(self.reward(features))
        if self.continuation is None:
            return reward, torch.ones_like(reward)
        alive = self.continuation.mean(self.continuation(features)) / self.continuation.discount
        return reward, alive.clamp(max=1.0)

    def evaluate(
        self, state: LatentState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        """The states step by step, then rewards and continuations of all of them at once."""
        if not self.steps_as(RSSMSimulator):
            return super().evaluate(state, actions, discount)
        batch, horizon = actions.shape[:2]
        noise = self.rssm.draw_noise((horizon, batch), actions.device)
        states = []
        with self._autocast():
            for action, own in zip(actions.transpose(0, 1).contiguous(), noise, strict=True):
                state = self._predict(state, action, own)
                states.append(state)
            outcome = self._outcome(stack_states(states, 0).flatten())
        reward, continuation = (part.view(horizon, batch).t() for part in outcome)
        return discounted(reward, continuation, discount, state)

    def spread(self, state: LatentState, candidates: int, particles: int = 1) -> LatentState:
        if self._copies is not None:
            state = state.map(partial(Tensor.to, dtype=self._copies.dtype))
        return state.map(lambda part: part.repeat_interleave(candidates * particles, 0))

    def value(self, state: LatentState) -> Float[Tensor, " batch"]:
        return super().value(state) if self._value is None else self._value(state.features)

    def policy(self, state: LatentState) -> Float[Tensor, "batch action"]:
        return super().policy(state) if self._policy is None else self._policy(state.features)

    def policy_logits(self, state: LatentState) -> Float[Tensor, "batch classes"]:
        return super().policy_logits(state) if self._logits is None else self._logits(state.features)

"""A latent world model to plan in: PlaNet's, or that of any Dreamer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.representation_learners.base import LatentState, StateSpaceModel
from rl_lab.errors import ConfigError
from rl_lab.nn.capture import compile_block
from rl_lab.simulation.simulator import SimulatedStep, Simulator

FromFeatures = Callable[[Tensor], Tensor]


class LatentSimulator(Simulator):
    """Steps the prior of a state-space model; its state is a `LatentState`.

    Reward and continuation are read off the state that an action leads to. Latents are sampled, one sample a row.
    `value` and `policy` take features [rows, size], where the run has such networks.
    """

    def __init__(
        self,
        *,
        rssm: StateSpaceModel,
        reward: RewardPredictor,
        action_size: int,  # encoded
        encode: Callable[[Mapping[str, Tensor]], Tensor] | nn.Module | None = None,
        continuation: ContinuePredictor | None = None,
        value: FromFeatures | None = None,
        policy: FromFeatures | None = None,
    ) -> None:
        self.rssm, self.reward, self.encode, self.continuation = rssm, reward, encode, continuation
        self.action_size = action_size
        self._value, self._policy = value, policy
        self.has_value, self.has_policy = value is not None, policy is not None
        self._step: Callable[[LatentState, Tensor, Tensor], SimulatedStep] = self._plain_step

    def compile_steps(self) -> None:
        """Compile one step of the model."""
        self._step = compile_block(self._plain_step)

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
            raise ConfigError("This LatentSimulator has no encoder: give it one, or start from a latent state.")
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
        return self._step(state, action, self.rssm.draw_noise(action.shape[:1], action.device))

    def _plain_step(self, state: LatentState, action: Tensor, noise: Tensor) -> SimulatedStep:
        state = self.rssm.predict_step(state, action.to(state.deter.dtype), noise)
        features = state.features
        reward = self.reward.mean(self.reward(features))
        if self.continuation is None:
            return SimulatedStep(state, reward, torch.ones_like(reward))
        alive = self.continuation.mean(self.continuation(features)) / self.continuation.discount
        return SimulatedStep(state, reward, alive.clamp(max=1.0))

    def spread(self, state: LatentState, candidates: int, particles: int = 1) -> LatentState:
        return state.map(lambda part: part.repeat_interleave(candidates * particles, 0))

    def value(self, state: LatentState) -> Float[Tensor, " batch"]:
        return super().value(state) if self._value is None else self._value(state.features)

    def policy(self, state: LatentState) -> Float[Tensor, "batch action"]:
        return super().policy(state) if self._policy is None else self._policy(state.features)

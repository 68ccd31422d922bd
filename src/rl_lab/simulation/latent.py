"""A latent world model to plan in: PlaNet's, or that of any Dreamer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.representation_learners.base import LatentState, StateSpaceModel, stack_states
from rl_lab.errors import ConfigError
from rl_lab.nn.capture import compile_block
from rl_lab.nn.precision import TENSOR_CORE_MULTIPLE, WorkingCopies
from rl_lab.simulation.simulator import Evaluation, SimulatedStep, Simulator, discounted

FromFeatures = Callable[[Tensor], Tensor]
Judgement = tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead"]]  # reward and continuation


class LatentSimulator(Simulator):
    """Steps the prior of a state-space model; its state is a `LatentState`.

    Reward and continuation are read off the state that an action leads to. Latents are sampled, one sample a row.
    `value` and `policy` take features [rows, size], where the run has such networks.

    What filters observations (`rssm`) and what plans (`planned`) are two, where plans have weights of their own.
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
        self.planned = rssm
        self._copies: WorkingCopies | None = None
        self._autocast: Callable[[], AbstractContextManager] = nullcontext
        self._predict: Callable[[LatentState, Tensor, Tensor], LatentState] = self._plain_predict
        self._judge: Callable[[LatentState], Judgement] = self._plain_judge

    def compile_steps(self, dtype: torch.dtype | None = None) -> None:
        """Compile one step of the model. `dtype`: plans are computed with weights of this type, those of the last
        `observe`."""
        if dtype is not None:
            copies = self._copies = WorkingCopies(dtype, multiple=TENSOR_CORE_MULTIPLE)
            self.planned, self.reward = copies.add(self.rssm), copies.add(self.reward)
            self.continuation = None if self.continuation is None else copies.add(self.continuation)
            device = next(self.planned.parameters()).device.type
            self._autocast = lambda: torch.autocast(device, dtype)
        self._predict, self._judge = compile_block(self._plain_predict), compile_block(self._plain_judge)

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
            state = self._predict(state, action, self.rssm.draw_noise(action.shape[:1], action.device))
            return SimulatedStep(state, *self._judge(state))

    def _plain_predict(self, state: LatentState, action: Tensor, noise: Tensor) -> LatentState:
        return self.planned.predict_step(state, action.to(state.deter.dtype), noise)

    def _plain_judge(self, state: LatentState) -> Judgement:
        features = state.features
        reward = self.reward.mean(self.reward(features))
        if self.continuation is None:
            return reward, torch.ones_like(reward)
        alive = self.continuation.mean(self.continuation(features)) / self.continuation.discount
        return reward, alive.clamp(max=1.0)

    def evaluate(
        self, state: LatentState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        """Nothing waits for the rewards: they are read off all states at once."""
        batch, horizon = actions.shape[:2]
        noise = self.rssm.draw_noise((horizon, batch), actions.device)
        states = []
        with self._autocast():
            for action, own in zip(actions.transpose(0, 1).contiguous(), noise, strict=True):
                state = self._predict(state, action, own)
                states.append(state)
            judged = self._judge(stack_states(states, 0).flatten())
        reward, continuation = (part.view(horizon, batch).t() for part in judged)
        return Evaluation(*discounted(reward, continuation, discount), state)

    def spread(self, state: LatentState, candidates: int, particles: int = 1) -> LatentState:
        if self._copies is not None:
            state = state.map(partial(Tensor.to, dtype=self._copies.dtype))
        return state.map(lambda part: part.repeat_interleave(candidates * particles, 0))

    def value(self, state: LatentState) -> Float[Tensor, " batch"]:
        return super().value(state) if self._value is None else self._value(state.features)

    def policy(self, state: LatentState) -> Float[Tensor, "batch action"]:
        return super().policy(state) if self._policy is None else self._policy(state.features)

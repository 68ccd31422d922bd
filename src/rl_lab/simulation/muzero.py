"""MuZero's latent model as a simulator, so that any planner can plan in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.muzero.dynamics import MuZeroState
from rl_lab.components.muzero.model import MuZeroModel
from rl_lab.simulation.simulator import ModelState, Prediction, SimulatedStep, Simulator


class MuZeroSimulator(Simulator):
    """A state is a `MuZeroState`. Episodes do not end in it: beyond a terminal state reward and value are learned to
    be 0."""

    has_value = has_policy = True

    def __init__(
        self,
        *,
        model: MuZeroModel,
        discount: float,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.model, self.discount, self.autocast = model, discount, autocast
        self.has_logits = model.prediction.has_logits

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> MuZeroState:
        with self.autocast():
            return self.model.initial(observation)

    def step(self, state: MuZeroState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        with self.autocast():
            following, reward, _ = self.model.step(state, action)
        return SimulatedStep(following, reward, torch.ones_like(reward))

    def predict(self, state: MuZeroState) -> Prediction:
        with self.autocast():
            output = self.model.predict(state)
        return Prediction(output.policy, self.model.prediction.support.mean(output.value))

    def value(self, state: MuZeroState) -> Float[Tensor, " batch"]:
        return self.predict(state).value

    def policy_logits(self, state: MuZeroState) -> Float[Tensor, "batch classes"]:
        return self.predict(state).logits if self.has_logits else super().policy_logits(state)

    def policy(self, state: MuZeroState) -> Float[Tensor, "batch action"]:
        return self.policy_samples(state, 1)[:, 0]

    def policy_samples(self, state: MuZeroState, count: int) -> Float[Tensor, "batch count action"]:
        with self.autocast():
            params = self.model.predict(state).policy
        return self.model.prediction.policy.sample(params, count)

"""What a planner needs of any model: analytic dynamics, ensembles and latent models all answer the same five calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# A model's state: a tensor, or (nested) dicts and tuples of tensors, each [batch, ...], or None where a model leaves a
# part out. Planners only pass it on.
ModelState = Any
Policy = Callable[[ModelState], Float[Tensor, "batch action"]]


class SimulatedStep(NamedTuple):
    """What follows an action."""

    state: ModelState
    reward: Float[Tensor, " batch"]
    continuation: Float[Tensor, " batch"]  # probability that the episode goes on


class Rollout(NamedTuple):
    """An imagined stretch of `horizon` steps, time second. `reward[:, t]` follows `action[:, t]`."""

    states: list[ModelState]  # horizon + 1 of them: the start, then one after each action
    action: Float[Tensor, "batch horizon action"]
    reward: Float[Tensor, "batch horizon"]
    continuation: Float[Tensor, "batch horizon"]


class Evaluation(NamedTuple):
    """What a stretch of actions is worth."""

    total: Float[Tensor, " batch"]  # discounted rewards, each with the probability that the episode lasts until then
    weight: Float[Tensor, " batch"]  # what anything after it counts
    state: ModelState  # after the last action


class Simulator(ABC):
    """A model to plan in. Batched: candidates × environments, flattened into one leading dimension.

    Actions are encoded as models take them: [-1, 1] entries, or concatenated one-hots.
    """

    has_reward: bool = True
    has_value: bool = False
    has_policy: bool = False
    has_observation: bool = False

    @abstractmethod
    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> ModelState:
        """The model's state after seeing `observation`, [batch, ...] per key. A model with memory goes on from
        `previous` and the `action` that led here; memory is cleared where `is_first`."""

    @abstractmethod
    def step(self, state: ModelState, action: Float[Tensor, "batch action"]) -> SimulatedStep: ...

    def spread(self, state: ModelState, candidates: int, particles: int = 1) -> ModelState:
        """Room for every candidate of every environment: [env, ...] → [env × candidates × particles, ...].

        The particles of a candidate follow each other. A model that is uncertain may let each go its own way.
        """
        return map_state(lambda tensor: tensor.repeat_interleave(candidates * particles, 0), state)

    def evaluate(
        self, state: ModelState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        """Follow given actions and keep nothing but what they are worth: the inner loop of every planner."""
        total, weight = torch.zeros_like(actions[:, 0, 0]), torch.ones_like(actions[:, 0, 0])
        for time in range(actions.shape[1]):
            state, reward, continuation = self.step(state, actions[:, time])
            total, weight = account(total, weight, reward, continuation, discount)
        return Evaluation(total, weight, state)

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        """Expected return from a state on, where the model knows one (`has_value`)."""
        raise NotImplementedError(f"{type(self).__name__} predicts no value")

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        """An action drawn from the model's own policy, where it has one (`has_policy`)."""
        raise NotImplementedError(f"{type(self).__name__} has no policy")

    def observation(self, state: ModelState) -> dict[str, Tensor]:
        """What would be seen of a state, [batch, ...] per key, where the model knows it (`has_observation`)."""
        raise NotImplementedError(f"{type(self).__name__} predicts no observations")

    def rollout(
        self,
        state: ModelState,
        actions: Float[Tensor, "batch horizon action"] | Policy | None,
        horizon: int | None = None,
    ) -> Rollout:
        """Follow given actions, or a policy for `horizon` steps (None: the model's own policy)."""
        if isinstance(actions, Tensor):
            if horizon is not None and horizon > actions.shape[1]:
                raise ValueError(f"rollout: horizon {horizon} is longer than the {actions.shape[1]} actions given.")
            horizon = horizon or actions.shape[1]
        elif horizon is None or horizon < 1:
            raise ValueError(f"rollout: following a policy needs a horizon of at least 1, got {horizon}.")
        choose: Policy = actions if callable(actions) and not isinstance(actions, Tensor) else self.policy
        states, taken, rewards, continuations = [state], [], [], []
        for time in range(horizon):
            action = actions[:, time] if isinstance(actions, Tensor) else choose(state)
            state, reward, continuation = self.step(state, action)
            states.append(state)
            taken.append(action)
            rewards.append(reward)
            continuations.append(continuation)
        return Rollout(states, torch.stack(taken, 1), torch.stack(rewards, 1), torch.stack(continuations, 1))


def account(
    total: Float[Tensor, " batch"],
    weight: Float[Tensor, " batch"],
    reward: Float[Tensor, " batch"],
    continuation: Float[Tensor, " batch"],
    discount: float,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """`total` and `weight` of an Evaluation after one more step."""
    return total + weight * reward, weight * continuation * discount


def discounted(
    reward: Float[Tensor, "batch horizon"], continuation: Float[Tensor, "batch horizon"], discount: float
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """The same from all steps at once."""
    weight = (continuation * discount).cumprod(1)
    return reward[:, 0] + (weight[:, :-1] * reward[:, 1:]).sum(1), weight[:, -1]


def map_state(function: Callable[[Tensor], Tensor], state: ModelState) -> ModelState:
    """Apply a function to every tensor of a model state."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, Mapping):
        return {name: map_state(function, part) for name, part in state.items()}
    parts = [map_state(function, part) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def batch_size(state: ModelState) -> int:
    """The leading dimension of a model state."""
    while not isinstance(state, Tensor):
        state = next(iter(state.values() if isinstance(state, Mapping) else state))
    return state.shape[0]

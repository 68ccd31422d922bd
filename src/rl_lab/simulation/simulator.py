"""The interface between planners and models: analytic dynamics, ensembles and latent models have the same calls."""

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
    """The state after an action, and the reward and continuation on arriving there."""

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
    """The discounted rewards of a sequence of actions, and the factors that a value at its end is weighted with."""

    total: Float[Tensor, " batch"]  # Σ_t γ^t c_1…c_t r_{t+1}, with c the probability that the episode goes on
    weight: Float[Tensor, " batch"]  # γ^H c_1…c_H: of whatever comes after the last reward
    state: ModelState  # after the last action
    last_reward: Float[Tensor, " batch"]  # r_H
    last_weight: Float[Tensor, " batch"]  # γ^(H-1) c_1…c_{H-1}: of the last reward within the total


class Prediction(NamedTuple):
    """The prior over the classes of one discrete action and the value, of some states."""

    logits: Float[Tensor, "batch classes"]
    value: Float[Tensor, " batch"]


class Simulator(ABC):
    """A model to plan in. Batched: candidates × environments, flattened into one leading dimension.

    Actions are encoded as models take them: [-1, 1] entries, or concatenated one-hots.

    `discount` is the factor that the model's values were learned with; planners take it unless they have one of their
    own. `value_includes_reward`: V(s) begins with the reward received on arriving at s (Dreamer v1 and v2); otherwise
    it begins with the reward of the next step.
    """

    discount: float = 1.0
    value_includes_reward: bool = False
    has_reward: bool = True
    has_value: bool = False
    has_policy: bool = False
    has_logits: bool = False
    has_temperature: bool = False  # whether `temperature` changes how the next latent is drawn
    has_surprise: bool = False
    temperature: float = 1.0  # 0: the likeliest latent, 1: as learned, more: wilder
    members: int = 1  # of an ensemble
    member: int | None = None  # the one that is followed; None: all of them together
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
        """Follow given actions and keep only their discounted rewards and the last state: the inner loop of every
        planner."""
        rewards, continuations = [], []
        for action in actions.unbind(1):
            state, reward, continuation = self.step(state, action)
            rewards.append(reward)
            continuations.append(continuation)
        return discounted(torch.stack(rewards, 1), torch.stack(continuations, 1), discount, state)

    def steps_as(self, kind: type[Simulator]) -> bool:
        """Whether `step` is that of a class: only then may the class's `evaluate` compute all steps at once."""
        return type(self).step is kind.step and "step" not in vars(self)

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        """Expected return from a state on, where the model has one (`has_value`); see `value_includes_reward`."""
        raise NotImplementedError(f"{type(self).__name__} predicts no value")

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        """An action drawn from the model's own policy, where it has one (`has_policy`)."""
        raise NotImplementedError(f"{type(self).__name__} has no policy")

    def policy_samples(self, state: ModelState, count: int) -> Float[Tensor, "batch count action"]:
        """`count` independent actions of the policy in each state."""
        return self.policy(self.spread(state, count)).unflatten(0, (-1, count))

    def policy_logits(self, state: ModelState) -> Float[Tensor, "batch classes"]:
        """The policy's logits over the classes of one discrete action, where it has them (`has_logits`)."""
        raise NotImplementedError(f"{type(self).__name__} has no policy over discrete actions")

    def predict(self, state: ModelState) -> Prediction:
        """Policy logits and value of the same states; a model whose networks share layers computes them at once."""
        return Prediction(self.policy_logits(state), self.value(state))

    def observation(self, state: ModelState) -> dict[str, Tensor]:
        """The predicted observation of a state, [batch, ...] per key, where the model has one (`has_observation`)."""
        raise NotImplementedError(f"{type(self).__name__} predicts no observations")

    def surprise(self, state: ModelState, observation: Mapping[str, Tensor]) -> Float[Tensor, " batch"]:
        """KL of what was seen against what was foreseen, in nats, where the model has both (`has_surprise`). `state` is
        the one after `observation`."""
        raise NotImplementedError(f"{type(self).__name__} foresees no distribution")

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


def discounted(
    reward: Float[Tensor, "batch horizon"],
    continuation: Float[Tensor, "batch horizon"],
    discount: float,
    state: ModelState,
) -> Evaluation:
    """The evaluation of all steps at once; `state` is the one after the last action."""
    weights = torch.cat([torch.ones_like(reward[:, :1]), (continuation * discount).cumprod(1)], 1)
    return Evaluation((weights[:, :-1] * reward).sum(1), weights[:, -1], state, reward[:, -1], weights[:, -2])


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

"""Planning in a learned model of observations: one network or an ensemble, with particles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actors.dreamer import Actor
from rl_lab.components.critics.dreamer import Critic
from rl_lab.components.dynamics.base import Dynamics
from rl_lab.components.dynamics.outcomes import OutcomeModel
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import Evaluation, ModelState, SimulatedStep, Simulator, discounted

Propagation = Literal["ts1", "tsinf"]


class LearnedSimulator(Simulator):
    """States are flat observations: [rows, observation], each step the expected one, or particles of it.

    With particles (PETS: trajectory sampling) a state is [rows, particles, observation]: every particle follows one
    member of the ensemble, and each step is drawn. `tsinf`: it follows the same member throughout, so the spread shows
    what the members disagree in. `ts1`: the particles change members at each step.
    """

    has_observation = True

    def __init__(
        self,
        *,
        dynamics: Dynamics,
        outcome: OutcomeModel,
        propagation: Propagation = "tsinf",
        discount: float = 1.0,  # that the critic is trained with
        policy: Actor | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.discount = discount
        self.dynamics, self.outcome, self.propagation = dynamics, outcome, propagation
        self.members = dynamics.elites
        self.actor, self.critic = policy, critic
        self.has_policy, self.has_value = policy is not None, critic is not None
        self.has_logits = policy is not None and len(policy.codec.spec.classes) == 1

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> ModelState:
        return self.dynamics.vector.join(observation)

    def observation(self, state: ModelState) -> dict[str, Tensor]:
        return self.dynamics.vector.split(state.flatten(0, -2))

    def spread(self, state: ModelState, candidates: int, particles: int = 1) -> ModelState:
        rows = state.repeat_interleave(candidates, 0)
        if particles == 1:
            return rows
        if particles % self.dynamics.elites:
            raise ConfigError(
                f"particles={particles}, but {self.dynamics.elites} members of the ensemble are planned with: expected "
                "a multiple, so that each gets as many particles, or 1 for their mean."
            )
        return rows[:, None].expand(-1, particles, -1)

    def evaluate(
        self, state: ModelState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        """The dynamics step by step, then rewards and ends of all steps at once: far fewer operations."""
        if not self.steps_as(LearnedSimulator):
            return super().evaluate(state, actions, discount)
        horizon, states = actions.shape[1], [state]
        for action in actions.unbind(1):
            states.append(self._following(states[-1], action))
        path = torch.stack([part.flatten(0, -2) for part in states], 1)
        reward, goes_on = self.outcome(path[:, :-1].flatten(0, 1), actions.flatten(0, 1), path[:, 1:].flatten(0, 1))
        return discounted(reward.view(-1, horizon), goes_on.view(-1, horizon), discount, states[-1])

    def step(self, state: ModelState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        following = self._following(state, action)
        reward, continuation = self.outcome(state.flatten(0, -2), action, following.flatten(0, -2))
        return SimulatedStep(following, reward, continuation)

    def _following(self, state: Tensor, action: Tensor) -> Tensor:
        if state.ndim == 2 and self.member is not None:
            rows = (self.dynamics.elites, -1, -1)
            return self.dynamics.predict(state.expand(*rows), action.expand(*rows), sample=False)[self.member]
        if state.ndim == 2:
            return self.dynamics.expect(state, action)
        return self._each_by_its_member(state, action.view(*state.shape[:2], -1))

    def _each_by_its_member(self, state: Tensor, action: Tensor) -> Tensor:
        """Particle k follows member k mod members, or, in another order at each step, any."""
        members, (rows, particles, _) = self.dynamics.elites, state.shape
        order = torch.rand(particles, device=state.device).argsort() if self.propagation == "ts1" else None

        def by_member(value: Tensor) -> Tensor:  # [rows, particles, …] → [members, rows × particles / members, …]
            value = value if order is None else value[:, order]
            return value.reshape(rows * particles // members, members, -1).transpose(0, 1)

        following = self.dynamics.predict(by_member(state), by_member(action), sample=True)
        following = following.transpose(0, 1).reshape(rows, particles, -1)
        return following if order is None else following[:, order.argsort()]

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        assert self.critic is not None
        return self.critic.mean(self.critic(self.dynamics.features(state.flatten(0, -2))))

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        assert self.actor is not None
        drawn = self.actor.distribution(self.actor(self.dynamics.features(state.flatten(0, -2)))).sample()
        return drawn.clamp(-1.0, 1.0)

    def policy_logits(self, state: ModelState) -> Float[Tensor, "batch classes"]:
        if self.actor is None or not self.has_logits:
            return super().policy_logits(state)
        return self.actor(self.dynamics.features(state.flatten(0, -2)))

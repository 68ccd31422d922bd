"""The context's handle on the run's model."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import Evaluation, ModelState, Policy, Rollout, SimulatedStep, Simulator


class SimulatorService:
    """Passes every call to the simulator that is attached, which a workflow may exchange (a model that was re-trained).

    Planners keep the service, so they always plan in the present model.
    """

    def __init__(self, simulator: Simulator | None = None) -> None:
        self._simulator = simulator

    def attach(self, simulator: Simulator) -> None:
        """Plan in this model from now on."""
        self._simulator = simulator

    @property
    def simulator(self) -> Simulator:
        if self._simulator is None:
            raise ConfigError(
                "No simulator is attached: a planner was asked to plan before the workflow gave it a model. Workflows"
                " attach theirs with context.simulator.attach(…) in _bind_context."
            )
        return self._simulator

    @property
    def has_reward(self) -> bool:
        return self.simulator.has_reward

    @property
    def has_value(self) -> bool:
        return self.simulator.has_value

    @property
    def has_policy(self) -> bool:
        return self.simulator.has_policy

    def observe(
        self,
        observation: Mapping[str, Tensor],
        *,
        previous: ModelState | None = None,
        action: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> ModelState:
        return self.simulator.observe(observation, previous=previous, action=action, is_first=is_first)

    def step(self, state: ModelState, action: Float[Tensor, "batch action"]) -> SimulatedStep:
        return self.simulator.step(state, action)

    def value(self, state: ModelState) -> Float[Tensor, " batch"]:
        return self.simulator.value(state)

    def policy(self, state: ModelState) -> Float[Tensor, "batch action"]:
        return self.simulator.policy(state)

    def evaluate(
        self, state: ModelState, actions: Float[Tensor, "batch horizon action"], discount: float = 1.0
    ) -> Evaluation:
        return self.simulator.evaluate(state, actions, discount)

    def rollout(
        self,
        state: ModelState,
        actions: Float[Tensor, "batch horizon action"] | Policy | None,
        horizon: int | None = None,
    ) -> Rollout:
        return self.simulator.rollout(state, actions, horizon)

    def spread(self, state: ModelState, candidates: int, particles: int = 1) -> ModelState:
        return self.simulator.spread(state, candidates, particles)

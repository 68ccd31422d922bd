"""The planner of TD-MPC and TD-MPC2: policy-guided MPPI that plays one of its elites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.base import Memory, Plan, take
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.components.planners.search import Search
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState
from rl_lab.specs import ActionSpec

MANY_ACTIONS = 20  # from so many action entries on, TD-MPC2 makes two more iterations


class TDMPCPlanner(PolicyGuided):
    """The elites are weighted by exp(temperature · (return - best)): here a higher temperature is greedier.

    The deviation starts afresh at every decision, only the mean is kept. What is done is the first action of one of the
    elites, drawn by their weights.

    Discrete actions: the probabilities of the classes take the place of the normal. They are the weighted frequencies
    among the elites, with a share `class_floor` of equal ones (as `min_std`); at the beginning of a decision, half of
    them are equal ones (as the wide deviation).
    """

    std_floor: Tensor

    def __init__(
        self,
        *,
        action: ActionLayout | ActionSpec | Mapping[str, Any],
        horizon: int = 3,
        samples: int = 512,  # the policy's among them
        policy_samples: int = 24,
        iterations: int | Literal["auto"] = "auto",  # auto: 6, and 8 with 20 or more action entries
        elites: int = 64,
        temperature: float = 0.5,
        min_std: float = 0.05,
        max_std: float = 2.0,  # that of the first iteration, too
        momentum: float = 0.0,  # share of the old mean in the new one
        first_class_floor: float = 0.5,
        **arguments: Any,
    ) -> None:
        if temperature <= 0.0 or not 0.0 <= momentum < 1.0 or not 0.0 <= first_class_floor <= 1.0:
            raise ConfigError(
                f"temperature={temperature}, momentum={momentum}, first_class_floor={first_class_floor}: expected a "
                "temperature above 0, momentum from 0 to below 1, and first_class_floor from 0 to 1."
            )
        many = ActionLayout.of(action).size >= MANY_ACTIONS
        super().__init__(
            action=action, horizon=horizon, samples=samples, policy_samples=policy_samples, elites=elites,
            iterations=(8 if many else 6) if iterations == "auto" else iterations, temperature=1.0 / temperature,
            std=max_std, min_std=min_std, **arguments,
        )  # fmt: skip
        self.momentum, self.first_class_floor = momentum, first_class_floor
        self.planned = horizon  # steps that are planned now, where a schedule lengthens it
        self.register_buffer("std_floor", torch.tensor(float(min_std)))  # a tensor, for it may follow a schedule

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        candidates = super().draw_noise(num_envs)["candidates"][..., : self.planned, :]
        assert self.elites is not None
        choice = torch.empty(num_envs, self.elites, device=self.neutral.device).exponential_()
        return {"candidates": candidates, "choice": choice}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        plan = super()._plan(state, memory, noise)
        returns = plan.returns.gather(1, plan.elites)
        # The first of exponential clocks with these rates rings for each elite with its probability.
        chosen = (self._weights(returns) / noise["choice"]).argmax(1, keepdim=True)
        actions = take(plan.candidates, plan.elites.gather(1, chosen))[:, 0]
        return replace(plan, actions=actions, value=returns.gather(1, chosen)[:, 0])

    def _first_mean(self, memory: Memory) -> Float[Tensor, "env planned action"]:
        return self.layout.keep_possible(super()._first_mean(memory)[:, : self.planned], self.first_class_floor)

    def _next_memory(self, mean: Float[Tensor, "env planned action"], last: Tensor | None = None) -> Memory:
        unplanned = self.neutral.expand(len(mean), self.horizon - self.planned, -1)
        return super()._next_memory(torch.cat([mean, unplanned], 1), last)

    def _fixed_candidates(self, state: ModelState) -> Float[Tensor, "env candidate planned action"]:
        """What the policy would do. Nothing needs to follow the last of its actions."""
        simulator, actions = self.simulator, list[Tensor]()
        state = simulator.spread(state, self.policy_samples)
        for time in range(self.planned):
            actions.append(simulator.policy(state))
            if time + 1 < self.planned:
                state = simulator.step(state, actions[-1]).state
        return torch.stack(actions, 1).unflatten(0, (-1, self.policy_samples)).to(self.neutral.dtype)

    def _refit(
        self,
        search: Search,
        chosen: Float[Tensor, "env elite planned action"],
        weight: Float[Tensor, "env elite"],
    ) -> Search:
        fitted = super()._refit(search, chosen, weight)
        mean = torch.lerp(fitted.mean, search.mean, self.momentum) if self.momentum else fitted.mean
        return Search(mean, torch.maximum(fitted.std, self.std_floor))

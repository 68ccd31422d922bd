"""Random shooting: many random sequences, the best is followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_lab.components.planners.base import Memory, Plan, Planner, check_counts, take
from rl_lab.simulation.simulator import ModelState


class RandomShooting(Planner):
    """Uniform sequences; with a warm start the rest of the last plan is one of the candidates."""

    def __init__(self, *, samples: int, shown_elites: int = 10, **arguments: Any) -> None:
        super().__init__(**arguments)
        check_counts(samples=samples, iterations=1)
        self.samples, self.shown_elites = samples, min(shown_elites, samples)

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        return {"candidates": self._normal(num_envs, self.samples)}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        candidates = self.layout.uniform(noise["candidates"])
        if self.warm_start:
            known = memory["plan_known"][:, None, None] > 0
            first = torch.where(known, self.layout.valid(memory["plan_mean"]), candidates[:, 0])
            candidates = torch.cat([first[:, None], candidates[:, 1:]], 1)
        returns = self.score(state, candidates)
        best_returns, elites = returns.topk(self.shown_elites, 1)
        actions = take(candidates, elites[:, :1])[:, 0]
        std = candidates.std(1, unbiased=False)
        return Plan(actions, best_returns[:, 0], candidates, returns, elites, std, self._next_memory(actions))

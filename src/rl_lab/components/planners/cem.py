"""The cross-entropy method (Rubinstein, 1999; as in PETS and PlaNet)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.components.planners.base import Memory, Plan, Planner, check_counts, take
from rl_lab.components.planners.search import Search, moments
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState

VARIANCE_FLOOR = 1e-6


class CEM(Planner):
    """Draw sequences, keep the best, fit the next distribution to them; some iterations of that.

    PlaNet's: horizon 12, 10 iterations, 1000 samples, 100 elites, init_std 1, momentum 0, no warm start.
    """

    def __init__(
        self,
        *,
        samples: int,
        iterations: int,
        elites: int,
        init_std: float,  # of continuous entries, at every decision
        min_std: float,
        momentum: float,  # share of the old mean and variance in the new ones
        class_floor: float,  # share of equal probabilities in those of discrete actions
        execute: Literal["mean", "best"],  # best is for exact models: with learned ones it finds their errors
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        check_counts(samples=samples, iterations=iterations, elites=elites)
        if init_std <= 0.0 or min_std < 0.0 or not 0.0 <= momentum < 1.0 or not 0.0 <= class_floor < 1.0:
            raise ConfigError(
                f"init_std={init_std}, min_std={min_std}, momentum={momentum}, class_floor={class_floor}: expected "
                "init_std > 0, min_std >= 0, and momentum and class_floor from 0 to less than 1."
            )
        self.samples, self.iterations, self.elites = samples, iterations, elites
        self.init_std, self.min_std, self.momentum = init_std, min_std, momentum
        self.class_floor, self.execute = class_floor, execute

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        return {"candidates": self._normal(self.iterations, num_envs, self.samples)}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        search = self._start(memory)
        for iteration in range(self.iterations):
            candidates = self._draw(search, noise["candidates"][iteration])
            returns = self.score(state, candidates)
            elite_returns, elites = returns.topk(self.elites, 1)
            search = self._refit(search, take(candidates, elites), elite_returns)
        return self._chosen(search, candidates, returns, elites, self._next_memory(search.mean))

    def _start(self, memory: Memory) -> Search:
        mean = self._first_mean(memory)
        return Search(mean, torch.full_like(mean, self.init_std))

    def _draw(
        self, search: Search, noise: Float[Tensor, "env candidate horizon action"]
    ) -> Float[Tensor, "env candidate horizon action"]:
        return self.layout.sample(search.mean[:, None].expand_as(noise), search.std[:, None].expand_as(noise), noise)

    def _refit(
        self,
        search: Search,
        elites: Float[Tensor, "env elite horizon action"],
        returns: Float[Tensor, "env elite"],
    ) -> Search:
        """Mean and variance of the elites whose return is finite; the old ones where there is none."""
        finite = returns.isfinite().to(elites.dtype)
        mean, variance = moments(elites, finite / finite.sum(1, keepdim=True).clamp(min=1.0))
        mean = self.momentum * search.mean + (1.0 - self.momentum) * mean
        variance = self.momentum * search.std.square() + (1.0 - self.momentum) * variance
        std = (variance + VARIANCE_FLOOR).sqrt().clamp(min=self.min_std)
        found = finite.amax(1)[:, None, None] > 0
        mean = self.layout.keep_possible(torch.where(found, mean, search.mean), self.class_floor)
        return Search(mean, torch.where(found, std, search.std))

    def _chosen(
        self,
        search: Search,
        candidates: Float[Tensor, "env candidate horizon action"],
        returns: Float[Tensor, "env candidate"],
        elites: Int[Tensor, "env elite"],
        memory: Memory,
    ) -> Plan:
        elite_returns = returns.gather(1, elites)
        if self.execute == "best":
            actions, value = take(candidates, elites[:, :1])[:, 0], elite_returns[:, 0]
        else:
            finite = elite_returns.isfinite()
            total = torch.where(finite, elite_returns, 0.0).sum(1)
            actions, value = self.layout.valid(search.mean), total / finite.sum(1).clamp(min=1)
        return Plan(actions, value, candidates, returns, elites, search.std, memory)

"""Model predictive path integral control (Williams et al., 2017), and the variant of TD-MPC (Hansen et al., 2022)."""

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


class MPPI(Planner):
    """The new mean is the average of all candidates, weighted by exp(return / temperature).

    With `elites` only the best count, and with `min_std` the deviation is fitted too: TD-MPC's planner (its temperature
    of 0.5 multiplies: it is 2 here). How greedy it is depends on the scale of the returns.
    """

    def __init__(
        self,
        *,
        samples: int,
        iterations: int,
        temperature: float,
        std: float,  # of continuous entries, at the beginning of every decision
        elites: int | None,  # null: all
        min_std: float | None,  # null: the deviation stays what it is
        class_floor: float,  # share of equal probabilities in those of discrete actions
        execute: Literal["mean", "best"],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        check_counts(samples=samples, iterations=iterations, elites=elites)
        if temperature <= 0.0 or std <= 0.0 or not 0.0 <= class_floor < 1.0:
            raise ConfigError(
                f"temperature={temperature}, std={std}, class_floor={class_floor}: expected more than 0 of the first "
                "two, and class_floor from 0 to less than 1."
            )
        if min_std is not None and not 0.0 <= min_std <= std:
            raise ConfigError(f"min_std={min_std}, std={std}: expected min_std from 0 to std, or null.")
        self.samples, self.iterations, self.temperature = samples, iterations, temperature
        self.std, self.min_std, self.elites = std, min_std, elites
        self.class_floor, self.execute = class_floor, execute

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        return {"candidates": self._normal(self.iterations, num_envs, self.samples)}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        mean = self._first_mean(memory)
        search = Search(mean, torch.full_like(mean, self.std))
        fixed = self._fixed_candidates(state)
        for draw in noise["candidates"]:
            drawn = self.layout.sample(search.mean[:, None].expand_as(draw), search.std[:, None].expand_as(draw), draw)
            candidates = drawn if fixed is None else torch.cat([fixed, drawn], 1)
            returns = self.score(state, candidates)
            best_returns, best = returns.topk(self.elites or candidates.shape[1], 1)
            weight = self._weights(best_returns)
            search = self._refit(search, take(candidates, best), weight)
        return self._chosen(search, candidates, returns, best, weight)

    def _fixed_candidates(self, state: ModelState) -> Float[Tensor, "env candidate horizon action"] | None:
        """Sequences that compete in every iteration."""
        return None

    def _weights(self, returns: Float[Tensor, "env candidate"]) -> Float[Tensor, "env candidate"]:
        """0 for all where no return is finite."""
        return (returns / self.temperature).softmax(1).nan_to_num(0.0)

    def _refit(
        self,
        search: Search,
        chosen: Float[Tensor, "env candidate horizon action"],
        weight: Float[Tensor, "env candidate"],
    ) -> Search:
        mean, variance = moments(chosen, weight.to(chosen.dtype))
        found = weight.amax(1)[:, None, None] > 0
        mean = self.layout.keep_possible(torch.where(found, mean, search.mean), self.class_floor)
        if self.min_std is None:
            return Search(mean, search.std)
        return Search(mean, torch.where(found, variance.sqrt().clamp(self.min_std, self.std), search.std))

    def _chosen(
        self,
        search: Search,
        candidates: Float[Tensor, "env candidate horizon action"],
        returns: Float[Tensor, "env candidate"],
        best: Int[Tensor, "env chosen"],
        weight: Float[Tensor, "env chosen"],
    ) -> Plan:
        best_returns = returns.gather(1, best)
        if self.execute == "best":
            actions, value = take(candidates, best[:, :1])[:, 0], best_returns[:, 0]
        else:
            actions = self.layout.valid(search.mean)
            value = (weight * torch.where(weight > 0, best_returns, 0.0)).sum(1)
        shown = best[:, : max(1, candidates.shape[1] // 10)] if self.elites is None else best
        return Plan(actions, value, candidates, returns, shown, search.std, self._next_memory(search.mean))

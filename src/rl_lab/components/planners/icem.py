"""iCEM, the sample-efficient cross-entropy method (Pinneri et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.planners.base import Memory, Plan, take
from rl_lab.components.planners.cem import CEM
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState


class ICEM(CEM):
    """CEM with coloured noise, fewer samples in each iteration, and elites that stay in the race.

    A share of the elites goes on to the next iteration, and, one step on, to the next decision. They are scored again,
    so the model may be uncertain. The mean joins the last iteration, and the best sequence of that is followed.
    """

    def __init__(
        self,
        *,
        samples: int,
        iterations: int,
        elites: int,
        keep: float,  # share of the elites that goes on
        decay: float,  # each iteration draws this many times fewer samples, but at least twice the elites
        noise_beta: float,
        execute: Literal["mean", "best"],
        **arguments: Any,
    ) -> None:
        super().__init__(
            samples=samples, iterations=iterations, elites=elites, noise_beta=noise_beta, execute=execute, **arguments
        )
        if not 0.0 <= keep <= 1.0 or decay < 1.0:
            raise ConfigError(f"keep={keep}, decay={decay}: expected keep from 0 to 1, and decay of at least 1.")
        self.kept = max(1, round(keep * elites)) if keep else 0
        self.populations = [samples]
        for _ in range(1, iterations):
            self.populations.append(max(min(2 * elites, samples), int(self.populations[-1] / decay)))

    def initial_memory(self, num_envs: int) -> Memory:
        elites = self.neutral.new_zeros(num_envs, self.kept, self.horizon, self.layout.size)
        return super().initial_memory(num_envs) | {"plan_elites": elites}

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        """For all iterations' samples side by side, and for what stands in where no elites are kept yet."""
        return {"candidates": self._normal(num_envs, self.kept + sum(self.populations))}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> Plan:
        search = self._start(memory)
        further, *draws = noise["candidates"].split([self.kept, *self.populations], 1)
        fresh = self._draw(search, further)
        # An elite of the last decision has one step less than the horizon: its last one is drawn.
        shifted = torch.cat([memory["plan_elites"][:, :, 1:], fresh[:, :, -1:]], 2)
        kept = torch.where(memory["plan_known"][:, None, None, None] > 0, shifted, fresh)
        for iteration, draw in enumerate(draws):
            candidates = torch.cat([kept, self._draw(search, draw)], 1)
            if iteration == self.iterations - 1:
                candidates = torch.cat([candidates[:, :-1], self.layout.valid(search.mean)[:, None]], 1)
            returns = self.score(state, candidates)
            elite_returns, elites = returns.topk(self.elites, 1)
            chosen = take(candidates, elites)
            search, kept = self._refit(search, chosen, elite_returns), chosen[:, : self.kept]
        return self._chosen(search, candidates, returns, elites, self._remember(search.mean, kept))

    def _remember(
        self, mean: Float[Tensor, "env horizon action"], kept: Float[Tensor, "env kept horizon action"]
    ) -> Memory:
        """The mean goes on as it ended: its last step is repeated."""
        return self._next_memory(mean, mean[:, -1]) | {"plan_elites": kept}

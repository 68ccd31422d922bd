"""CMA-ES (Hansen & Ostermeier, 2001), as pycma implements it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from rl_lab.components.evolution.base import EvolutionStrategy
from rl_lab.errors import ConfigError

SEED_DOMAIN = 11
NEVER = 10**9


class CMAES(EvolutionStrategy):
    """Adapts the mean, the step size and the covariance of a normal distribution.

    Over hundreds of parameters a full covariance hardly moves within some hundred generations, so a diagonal one is the
    default. Where pycma sees no more progress the search restarts, `restarts` times, with a population `growth` times
    as large; the mean is then the one whose population did best.
    """

    def __init__(
        self, *, population: int = 64, sigma: float = 0.1, covariance: Literal["diagonal", "full"] = "diagonal",
        min_std: float = 0.0,  # of each parameter: keeps a search with noisy fitness from collapsing
        restarts: int = 0, growth: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__(population=population)
        if sigma <= 0.0 or growth < 1.0 or covariance not in ("diagonal", "full"):
            raise ConfigError(
                f"sigma={sigma}, growth={growth}, covariance={covariance}: expected a step size above 0, a growth of "
                "at least 1, and diagonal or full."
            )
        self.sigma, self.covariance, self.min_std = sigma, covariance, min_std
        self.first_population, self.restarts, self.growth = population, restarts, growth

    def _begin(self) -> None:
        self.population, self.restarted = self.first_population, 0
        self._best_mean, self._best_score = np.zeros(self.size), -np.inf
        self._search = self._new_search()

    def _new_search(self) -> Any:
        import cma  # late: a run that only acts does not need it

        stream = np.random.default_rng(np.random.SeedSequence([self.seed, SEED_DOMAIN, self.restarted]))
        options = {
            "popsize": self.population,
            "CMA_diagonal": self.covariance == "diagonal",
            "minstd": self.min_std,
            "randn": lambda *shape: stream.standard_normal(shape),
            "seed": np.nan,  # the stream above is seeded; NumPy's global one is left alone
            "tolflatfitness": NEVER,  # returns may tie
            "verbose": -9,
            "verb_log": 0,
        }
        return cma.CMAEvolutionStrategy(np.zeros(self.size), self.sigma, options)

    def _sample(self) -> np.ndarray:
        self._solutions = self._search.ask()
        return np.stack(self._solutions)

    def _learn(self, fitness: np.ndarray) -> None:
        self._search.tell(self._solutions, (-fitness).tolist())  # pycma minimises
        if fitness.mean() >= self._best_score or self.restarts == 0:
            self._best_score, self._best_mean = float(fitness.mean()), np.array(self._search.mean)
        if self.restarted < self.restarts and self._search.stop():
            self.restarted += 1
            self.population = round(self.first_population * self.growth**self.restarted)
            self._search = self._new_search()

    @property
    def mean(self) -> np.ndarray:
        return self._best_mean

    @property
    def spread(self) -> float:
        return float(np.mean(self._search.stds))

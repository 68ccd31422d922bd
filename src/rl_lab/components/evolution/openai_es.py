"""OpenAI's evolution strategy (Salimans et al., 2017): a gradient estimate from mirrored samples."""

from __future__ import annotations

import numpy as np

from rl_lab.components.evolution.base import EvolutionStrategy
from rl_lab.errors import ConfigError

SEED_DOMAIN = 12


class OpenAIES(EvolutionStrategy):
    """Half of the population is mean + σε, the other half mean - σε. The gradient is the mean of ε weighted with the
    member's rank, centred; Adam follows it. σ shrinks by `sigma_decay` in each generation."""

    def __init__(
        self, *, population: int = 64, sigma: float = 0.1, sigma_decay: float = 1.0, min_sigma: float = 0.01,
        lr: float = 0.03, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__(population=population)
        if population % 2 or sigma <= 0.0 or lr <= 0.0:
            raise ConfigError(
                f"population={population}, sigma={sigma}, lr={lr}: expected an even population (its members come in "
                "mirrored pairs), and numbers above 0."
            )
        self.sigma, self.sigma_decay, self.min_sigma = sigma, sigma_decay, min_sigma
        self.lr, self.betas, self.eps = lr, betas, eps

    def _begin(self) -> None:
        self._mean, self._momentum, self._second_moment = np.zeros((3, self.size))
        self._updates = 0

    def _sample(self) -> np.ndarray:
        stream = np.random.default_rng(np.random.SeedSequence([self.seed, SEED_DOMAIN, self._updates]))
        noise = stream.standard_normal((self.population // 2, self.size))
        self._noise = np.concatenate([noise, -noise])
        return self._mean + self.spread * self._noise

    def _learn(self, fitness: np.ndarray) -> None:
        ranks = fitness.argsort(kind="stable").argsort(kind="stable") / (self.population - 1) - 0.5
        gradient = ranks @ self._noise / (self.population * self.spread)
        self._updates += 1
        first, second = self.betas
        self._momentum = first * self._momentum + (1.0 - first) * gradient
        self._second_moment = second * self._second_moment + (1.0 - second) * gradient**2
        momentum = self._momentum / (1.0 - first**self._updates)
        scale = np.sqrt(self._second_moment / (1.0 - second**self._updates)) + self.eps
        self._mean = self._mean + self.lr * momentum / scale

    @property
    def mean(self) -> np.ndarray:
        return self._mean

    @property
    def spread(self) -> float:
        return max(self.min_sigma, self.sigma * self.sigma_decay**self._updates)

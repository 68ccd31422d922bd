"""The interface of evolution strategies: ask for a population, tell how each member did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_lab.errors import ConfigError


class EvolutionStrategy(nn.Module, ABC):
    """Maximises a fitness. `ask` gives the same population until `tell` is called; `mean` is the solution to use.

    Everything random follows from the seed and the fitness that was told, so the history of fitness is the whole state:
    a strategy is brought back by telling it again.
    """

    def __init__(self, *, population: int) -> None:
        super().__init__()
        if population < 2:
            raise ConfigError(
                f"population={population}: a strategy compares members, so it needs at least 2 (16 to 64 for a "
                "controller)."
            )
        self.population = population
        self._history: list[np.ndarray] = []  # fitness of every generation told so far
        self._told = 0  # how many of them the strategy itself has taken in; the others follow with the next `ask`
        self._asked: np.ndarray | None = None

    def start(self, *, size: int, seed: int) -> None:
        """Begin at zero with `size` parameters. What `tell` was told before is forgotten."""
        self.size, self.seed = size, seed
        self._history, self._told, self._asked = [], 0, None
        self._begin()

    @property
    def generation(self) -> int:
        """Generations that were told."""
        return len(self._history)

    def ask(self) -> np.ndarray:
        """The solutions to try, [population, size]."""
        while self._told < len(self._history):  # after loading
            self._sample()
            self._learn(self._history[self._told])
            self._told += 1
        if self._asked is None:
            self._asked = self._sample()
        return self._asked

    def tell(self, fitness: np.ndarray) -> None:
        """The fitness of the solutions that `ask` gave, [population]; higher is better."""
        solutions = self.ask()
        if fitness.shape != (len(solutions),) or not np.isfinite(fitness).all():
            raise ConfigError(f"tell: expected {len(solutions)} finite numbers, one for each member, got {fitness}.")
        self._learn(fitness)
        self._history.append(np.array(fitness, np.float64))
        self._told, self._asked = len(self._history), None

    @property
    @abstractmethod
    def mean(self) -> np.ndarray:
        """The centre of the search, [size]: less noisy than the best member, whose fitness may be luck."""

    @property
    @abstractmethod
    def spread(self) -> float:
        """The standard deviation of a parameter in the population, averaged over parameters."""

    @abstractmethod
    def _begin(self) -> None:
        """Stand at the first generation."""

    @abstractmethod
    def _sample(self) -> np.ndarray: ...

    @abstractmethod
    def _learn(self, fitness: np.ndarray) -> None:
        """Take in the fitness of the last sample."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": [torch.from_numpy(fitness) for fitness in self._history]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.start(size=self.size, seed=self.seed)
        self._history = [fitness.numpy() for fitness in state["history"]]

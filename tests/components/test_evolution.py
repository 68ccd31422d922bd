"""Evolution strategies and the trials of their populations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.components.evolution.base import EvolutionStrategy
from rl_lab.components.evolution.cma_es import CMAES
from rl_lab.components.evolution.openai_es import OpenAIES
from rl_lab.components.evolution.trials import Trials, dream_episodes, play_episodes
from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import SimulatedStep, Simulator

Fitness = Callable[[np.ndarray], np.ndarray]


def sphere(x: np.ndarray) -> np.ndarray:
    return -((x - 0.5) ** 2).sum(-1)


def rosenbrock(x: np.ndarray) -> np.ndarray:
    return -(100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1)


def evolve(strategy: EvolutionStrategy, fitness: Fitness, generations: int) -> np.ndarray:
    for _ in range(generations):
        strategy.tell(fitness(strategy.ask()))
    return strategy.mean


def started(kind: type[EvolutionStrategy], size: int = 6, seed: int = 3, **settings: Any) -> EvolutionStrategy:
    strategy = kind(**settings)
    strategy.start(size=size, seed=seed)
    return strategy


@pytest.mark.parametrize(
    ("kind", "settings", "fitness", "generations", "least"),
    [
        (CMAES, {"population": 12, "sigma": 0.3}, sphere, 80, -1e-6),
        (CMAES, {"population": 12, "sigma": 0.3, "covariance": "full"}, sphere, 80, -1e-6),
        (CMAES, {"population": 16, "sigma": 0.3, "covariance": "full"}, rosenbrock, 250, -1e-4),
        (OpenAIES, {"population": 16, "sigma": 0.05, "lr": 0.05}, sphere, 150, -2e-2),
    ],
)
def test_a_strategy_finds_the_optimum(
    kind: type[EvolutionStrategy], settings: dict[str, Any], fitness: Fitness, generations: int, least: float
) -> None:
    """The centre of the search comes close to the best there is."""
    assert fitness(evolve(started(kind, **settings), fitness, generations)) > least


def test_averaging_helps_against_noise() -> None:
    """On a noisy sphere the mean of several trials brings the search closer than single trials."""
    errors = {}
    for trials in (1, 16):
        noise = np.random.default_rng(0)

        def noisy(x: np.ndarray, trials: int = trials, noise: np.random.Generator = noise) -> np.ndarray:
            return sphere(x) + noise.normal(0, 1.0, (trials, len(x))).mean(0)

        errors[trials] = np.mean(
            [-sphere(evolve(started(CMAES, seed=s, population=16, sigma=0.3), noisy, 40)) for s in range(5)]
        )
    assert errors[16] < 0.5 * errors[1]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(CMAES, {"population": 8}), (CMAES, {"population": 8, "covariance": "full"}), (OpenAIES, {"population": 8})],
)
def test_the_same_seed_gives_the_same_search_and_a_saved_one_goes_on(
    kind: type[EvolutionStrategy], settings: dict[str, Any]
) -> None:
    """The state is plain, NumPy's global stream plays no part, and asking twice gives one population."""
    one, other = started(kind, **settings), started(kind, **settings)
    evolve(one, sphere, 7)
    np.random.seed(1)
    evolve(other, sphere, 7)
    np.testing.assert_array_equal(one.ask(), other.ask())
    np.testing.assert_array_equal(one.ask(), one.ask())
    assert not np.array_equal(one.ask(), evolve(started(kind, seed=4, **settings), sphere, 7))
    resumed = started(kind, **settings)
    resumed.load_state_dict(one.state_dict())
    assert resumed.generation == 7
    np.testing.assert_array_equal(resumed.ask(), one.ask())
    np.testing.assert_array_equal(evolve(resumed, sphere, 5), evolve(one, sphere, 5))


def test_restarts_grow_the_population_and_keep_the_best_mean() -> None:
    """A search that has converged begins anew; the solution in use does not get worse by it."""
    strategy = started(CMAES, size=2, population=6, sigma=0.5, restarts=2)
    best = -np.inf
    for _ in range(400):
        strategy.tell(np.round(sphere(strategy.ask()), 12))
        best = max(best, sphere(strategy.mean))
    assert strategy.restarted == 2
    assert strategy.population == len(strategy.ask()) == 24
    assert sphere(strategy.mean) > best - 1e-3


def test_a_population_of_one_is_refused() -> None:
    """There would be nothing to compare."""
    with pytest.raises(ConfigError, match="at least 2"):
        CMAES(population=1)
    with pytest.raises(ConfigError, match="mirrored pairs"):
        OpenAIES(population=7)


def test_trials_are_played_in_waves() -> None:
    """Every member plays every episode once, all members of an episode before the next; waves may end anywhere."""
    trials = Trials()
    trials.begin(3, 2)
    seen = []
    while not trials.complete:
        members, episodes = trials.next(4)
        seen += list(zip(episodes.tolist(), members.tolist(), strict=True))
        restored = Trials()
        restored.load_state_dict(trials.state_dict())
        trials = restored
        trials.begin(3, 2)  # a generation under way stays
        trials.record(members, episodes, 10.0 * members + episodes, np.ones(len(members), int))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    np.testing.assert_array_equal(trials.finish(), [0.5, 10.5, 20.5])


def test_episodes_are_counted_from_seed_to_end() -> None:
    """Row i plays seed i: the same action from the same seed gives the same return; patience cuts short."""
    envs = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=4, backend="sync"), seed=0)
    played = play_episodes(envs, [7, 7, 8], lambda seen: np.zeros((4, 1), np.int32))
    assert played.returns[0] == played.returns[1] == played.lengths[0]
    assert 8 <= played.returns.min() <= played.returns.max() <= 11
    assert played.env_steps == played.lengths.sum()
    envs.close()
    envs = make_vector_env(EnvironmentSettings(id="Pendulum-v1", num_envs=2, backend="sync"), seed=0)
    short = play_episodes(envs, [1, 2], lambda seen: np.zeros((2, 1), np.float32), patience=5)
    assert short.lengths.tolist() == [5, 5]  # its rewards are never above 0
    envs.close()


def test_a_dreamed_episode_ends_where_the_model_says_so() -> None:
    """The step that ends it is paid; what comes after is not; the horizon ends the others."""

    class Countdown(Simulator):
        def observe(self, observation: Any, **memory: Any) -> Any:
            return observation

        def step(self, state: torch.Tensor, action: torch.Tensor) -> SimulatedStep:
            return SimulatedStep(state - 1, torch.ones(3), (state > 1).float())

    played = dream_episodes(Countdown(), torch.tensor([1.0, 3.0, 100.0]), lambda state: state[:, None], horizon=6)
    assert played.returns.tolist() == played.lengths.tolist() == [1, 3, 6]

"""CEM and MPPI on Pendulum-v1 with known dynamics: return and time of RL Lab against mbrl-lib.

Both plan with the same samples, iterations, elites and horizon, in the same equations, from the same starts, on one
thread of one process, in turns. mbrl-lib plans for one environment at a time, RL Lab for all in one call (and, for
comparison, for one). mbrl-lib must be installed beside RL Lab; else only RL Lab is timed.
Run it: python benchmarks/planners.py [--episodes N] [--turns N] [--json results/speed/planners.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.base import Planner
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.mppi import MPPI
from rl_lab.simulation.analytic import AnalyticSimulator, make_task

HAS_MBRL = importlib.util.find_spec("mbrl") is not None
CLOCKS = ("wall", "cpu")
HORIZON, SAMPLES, ELITES, ITERATIONS, STEPS = 20, 100, 10, 5, 200
SIMULATOR = AnalyticSimulator(make_task(environment="Pendulum-v1"))
SHARED: dict[str, Any] = {
    "action": ActionLayout(1), "horizon": HORIZON, "samples": SAMPLES, "iterations": ITERATIONS, "discount": "auto",
    "particles": 1, "bootstrap": "auto", "warm_start": True, "noise_beta": 0.0, "class_floor": 0.05, "execute": "mean",
}  # fmt: skip
PLANNERS: dict[str, Callable[[], Planner]] = {
    "CEM": lambda: CEM(**SHARED, elites=ELITES, init_std=1.0, min_std=0.0, momentum=0.1),
    "MPPI": lambda: MPPI(**SHARED, temperature=1.0, std=1.0, elites=None, min_std=None),
}


class Played(NamedTuple):
    """The return of each episode, and milliseconds for a decision of one environment."""

    returns: list[float]
    wall: float
    cpu: float


class Stopwatch:
    """Wall and CPU time of what happens inside."""

    def __init__(self) -> None:
        self.wall, self.cpu = 0.0, 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter() - self._begin[0]
        self.cpu += time.process_time() - self._begin[1]

    def played(self, returns: list[float]) -> Played:
        decisions = STEPS * len(returns)
        return Played(returns, 1e3 * self.wall / decisions, 1e3 * self.cpu / decisions)


def starts(episodes: int) -> Tensor:
    """Angle and speed as Pendulum-v1 draws them."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(episodes, 2, generator=generator) - 1) * torch.tensor([math.pi, 1.0])


def play_rl_lab(name: str, state: Tensor) -> Played:
    """All environments planned in one call."""
    planner = PLANNERS[name]()
    planner.attach(SIMULATOR)
    memory, total, watch = planner.initial_memory(len(state)), torch.zeros(len(state)), Stopwatch()
    with torch.no_grad():
        for _ in range(STEPS):
            with watch:
                plan = planner.plan(state, memory)
            memory = plan.memory
            state, reward, _ = SIMULATOR.step(state, plan.action)
            total += reward
    return watch.played(total.tolist())


def mbrl_optimizer(name: str) -> Any:
    from mbrl.planning.trajectory_opt import CEMOptimizer, MPPIOptimizer

    bounds = {"lower_bound": [[-1.0]] * HORIZON, "upper_bound": [[1.0]] * HORIZON, "device": torch.device("cpu")}
    if name == "CEM":
        return CEMOptimizer(
            num_iterations=ITERATIONS, elite_ratio=ELITES / SAMPLES, population_size=SAMPLES, alpha=0.1,
            return_mean_elites=True, clipped_normal=True, **bounds,
        )  # fmt: skip
    return MPPIOptimizer(num_iterations=ITERATIONS, population_size=SAMPLES, gamma=1.0, sigma=1.0, beta=0.9, **bounds)


def mbrl_model() -> Any:
    """The same equations as a model of mbrl-lib."""
    import gymnasium
    import numpy as np
    from mbrl.models import Model, ModelEnv

    class KnownPendulum(Model):
        def forward(self, x, **kwargs):
            raise NotImplementedError

        def loss(self, model_in, target=None):
            raise NotImplementedError

        def eval_score(self, model_in, target=None):
            raise NotImplementedError

        def reset(self, obs, rng=None):
            return {"obs": torch.as_tensor(obs, dtype=torch.float32)}

        def sample(self, act, model_state, deterministic=False, rng=None):
            state = model_state["obs"]
            following = SIMULATOR.task.step(state, act)
            reward = SIMULATOR.task.reward(state, act, following)
            return following, reward[:, None], None, {"obs": following}

    class Spaces(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    never = lambda action, following: torch.zeros(len(following), 1, dtype=torch.bool)  # noqa: E731
    return ModelEnv(Spaces(), KnownPendulum(torch.device("cpu")), never, generator=torch.Generator())


def play_mbrl(name: str, state: Tensor) -> Played:
    """One environment after the other, the plan shifted as mbrl-lib's agent does."""
    model, returns, watch = mbrl_model(), [], Stopwatch()
    for row in state:
        optimizer, current, previous, total = mbrl_optimizer(name), row[None], torch.zeros(HORIZON, 1), 0.0
        for _ in range(STEPS):
            score = partial(model.evaluate_action_sequences, initial_state=current[0].numpy(), num_particles=1)
            with watch, torch.no_grad():
                plan = optimizer.optimize(score, x0=previous)
            previous = torch.cat([plan[1:], torch.zeros(1, 1)])
            current, reward, _ = SIMULATOR.step(current, plan[:1].clamp(-1.0, 1.0))
            total += float(reward)
        returns.append(total)
    return watch.played(returns)


def compare(name: str, state: Tensor, turns: int) -> dict[str, Any]:
    """In each turn both play some of the episodes; medians of the turns' times, and of their ratios."""
    pairs: dict[str, list[Played]] = {"rl_lab": [], "rl_lab_one": [], "mbrl": []}
    play_rl_lab(name, state[:1])  # warm-up
    for part in state.chunk(turns):
        torch.manual_seed(0)
        pairs["rl_lab"].append(play_rl_lab(name, part))
        pairs["rl_lab_one"].append(play_rl_lab(name, part[:1]))
        if HAS_MBRL:
            pairs["mbrl"].append(play_mbrl(name, part))
    row: dict[str, Any] = {"planner": name}
    for who, played in pairs.items():
        if not played:
            continue
        row[who] = {f"{clock}_ms": round(median(getattr(one, clock) for one in played), 2) for clock in CLOCKS}
        if who != "rl_lab_one":
            row[who]["return_mean"] = round(mean(value for one in played for value in one.returns), 1)
        if who != "mbrl" and HAS_MBRL:
            for clock in CLOCKS:
                turns_of_both = zip(played, pairs["mbrl"], strict=True)
                shares = [getattr(own, clock) / getattr(other, clock) for own, other in turns_of_both]
                row[who][f"{clock}_share"] = round(median(shares), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in PLANNERS:
        rows.append(compare(name, starts(asked.episodes), asked.turns))
        print(json.dumps(rows[-1]), flush=True)
    if asked.json:
        sizes = {"horizon": HORIZON, "samples": SAMPLES, "iterations": ITERATIONS, "elites": ELITES}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"mbrl": version("mbrl")} if HAS_MBRL else {}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        result = {
            "name": "planners", "environment": "Pendulum-v1, known dynamics", **sizes, "episodes": asked.episodes,
            "turns": asked.turns, "environments_in_one_call": asked.episodes // asked.turns, "threads": 1,
            "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1), "versions": versions,
            "commit": commit.stdout.strip(), "rows": rows,
        }  # fmt: skip
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

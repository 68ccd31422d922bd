"""CEM and MPPI on Pendulum-v1 with known dynamics: return and CPU time of RL Lab against mbrl-lib.

Both plan with the same samples, iterations and horizon, in the same equations, from the same starts, on one thread of
one process. mbrl-lib plans for one environment at a time, RL Lab for all in one call (and, for comparison, for one).
mbrl-lib must be installed beside RL Lab; else only RL Lab is timed.
Run it: python benchmarks/planners.py [--episodes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.base import Planner
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.mppi import MPPI
from rl_lab.simulation.analytic import AnalyticSimulator, make_task

HORIZON, SAMPLES, ELITES, ITERATIONS, STEPS = 20, 100, 10, 5, 200
SIMULATOR = AnalyticSimulator(make_task(environment="Pendulum-v1"))
PLANNERS: dict[str, Callable[[], Planner]] = {
    "cem": lambda: CEM(
        action=ActionLayout(1), horizon=HORIZON, samples=SAMPLES, elites=ELITES, iterations=ITERATIONS, init_std=1.0
    ),
    "mppi": lambda: MPPI(action=ActionLayout(1), horizon=HORIZON, samples=SAMPLES, iterations=ITERATIONS, std=1.0),
}


def starts(episodes: int) -> Tensor:
    """Angle and speed as Pendulum-v1 draws them."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(episodes, 2, generator=generator) - 1) * torch.tensor([math.pi, 1.0])


def play_rl_lab(name: str, state: Tensor) -> tuple[float, float]:
    """Mean return, and CPU milliseconds for a decision of one environment."""
    planner = PLANNERS[name]()
    planner.attach(SIMULATOR)
    memory, total = planner.initial_memory(len(state)), torch.zeros(len(state))
    torch.manual_seed(0)
    with torch.no_grad():
        planner.plan(state, memory)  # warm-up
        begin = time.process_time()
        for _ in range(STEPS):
            plan = planner.plan(state, memory)
            memory = plan.memory
            state, reward, _ = SIMULATOR.step(state, plan.action)
            total += reward
    return float(total.mean()), 1e3 * (time.process_time() - begin) / (STEPS * len(state))


def mbrl_optimizer(name: str) -> object:
    from mbrl.planning.trajectory_opt import CEMOptimizer, MPPIOptimizer

    bounds = {"lower_bound": [[-1.0]] * HORIZON, "upper_bound": [[1.0]] * HORIZON, "device": torch.device("cpu")}
    if name == "cem":
        return CEMOptimizer(
            num_iterations=ITERATIONS, elite_ratio=ELITES / SAMPLES, population_size=SAMPLES, alpha=0.1,
            return_mean_elites=True, clipped_normal=True, **bounds,
        )  # fmt: skip
    return MPPIOptimizer(num_iterations=ITERATIONS, population_size=SAMPLES, gamma=1.0, sigma=1.0, beta=0.9, **bounds)


def mbrl_model() -> object:
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


def play_mbrl(name: str, state: Tensor) -> tuple[float, float]:
    """The same for mbrl-lib: one environment after the other, the plan shifted as its agent does."""
    model, total, spent = mbrl_model(), 0.0, 0.0
    torch.manual_seed(0)
    for row in state:
        optimizer, current, previous = mbrl_optimizer(name), row[None], torch.zeros(HORIZON, 1)
        for _ in range(STEPS):
            begin = time.process_time()
            score = partial(model.evaluate_action_sequences, initial_state=current[0].numpy(), num_particles=1)
            with torch.no_grad():
                plan = optimizer.optimize(score, x0=previous)
            previous = torch.cat([plan[1:], torch.zeros(1, 1)])
            spent += time.process_time() - begin
            current, reward, _ = SIMULATOR.step(current, plan[:1].clamp(-1.0, 1.0))
            total += float(reward)
    return total / len(state), 1e3 * spent / (STEPS * len(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, state = [], starts(asked.episodes)
    for name in PLANNERS:
        together, alone = play_rl_lab(name, state), play_rl_lab(name, state[:1])
        row = {"planner": name, "return": together[0], "ms": together[1], "ms_one_environment": alone[1]}
        try:
            theirs = play_mbrl(name, state)
        except ImportError:
            theirs = None
        if theirs is not None:
            row |= {"mbrl_return": theirs[0], "mbrl_ms": theirs[1], "time_share": together[1] / theirs[1]}
            row["time_share_one_environment"] = alone[1] / theirs[1]
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    if asked.json:
        sizes = {"horizon": HORIZON, "samples": SAMPLES, "iterations": ITERATIONS, "episodes": asked.episodes}
        asked.json.write_text(json.dumps({"benchmark": "planners_pendulum", **sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

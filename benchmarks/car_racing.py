"""CarRacing-v3: CPU time of a decision in Gymnasium, in RL Lab and in envpool, and what envpool changes.

RL Lab's pictures are Gymnasium's own to the last pixel, with what cannot be seen left out. envpool's are not: with RUN,
a finished run of World Models, its agent plays as many episodes in both (on other tracks, by other seeds), and V
reconstructs the pictures of both. One thread.
Run it: python benchmarks/car_racing.py [RUN] [--episodes N]
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from measuring import write_record

from rl_lab.components.evolution.trials import play_episodes
from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.environments.headless import prepare_rendering
from rl_lab.experiment.agent import load
from rl_lab.records import Observation

NUM_ENVS, WARM_UP, DECISIONS = 8, 15, 60  # the camera zooms in during the first 50 frames
SETTINGS = EnvironmentSettings(
    id="CarRacing-v3", num_envs=NUM_ENVS, backend="sync", action_repeat=4, normalize_actions=False
)
ACTION = np.array([0.0, 0.2, 0.0], np.float32)


def gymnasium_ms() -> float:
    """Every frame drawn, as Gymnasium does."""
    env = gymnasium.make("CarRacing-v3", max_episode_steps=-1)
    env.reset(seed=0)
    for _ in range(4 * WARM_UP):
        env.step(ACTION)
    began = time.process_time()
    for _ in range(4 * DECISIONS):
        env.step(ACTION)
    seconds = time.process_time() - began
    env.close()
    return 1e3 * seconds / DECISIONS


def vector_ms(backend: Any) -> float:
    envs = make_vector_env(replace(SETTINGS, backend=backend, workers=1), seed=0, stream="evolution")
    envs.reset(list(range(NUM_ENVS)))
    actions = np.tile(ACTION, (NUM_ENVS, 1))
    for _ in range(WARM_UP):
        envs.step(actions)
    began = time.process_time()
    for _ in range(DECISIONS):
        envs.step(actions)
    seconds = time.process_time() - began
    envs.close()
    return 1e3 * seconds / DECISIONS / NUM_ENVS


@torch.no_grad()
def played(run: str, backend: Any, episodes: int) -> dict[str, float]:
    """Scores of the run's agent, and V's squared error of a picture, summed over pixels, along the way."""
    workflow = load(run).workflow
    returns, errors = list[float](), list[float]()
    envs = make_vector_env(replace(SETTINGS, backend=backend), seed=0, stream="eval")
    for start in range(0, episodes, NUM_ENVS):
        state = workflow.initial_state(NUM_ENVS)

        def act(observation: Observation) -> np.ndarray:
            nonlocal state
            image = torch.from_numpy(observation["image"])
            shown = workflow.representation.decode(workflow.representation.encode({"image": image}).mean)["image"]
            errors.append(float((shown - image / 255.0).square().sum((1, 2, 3)).mean()))
            action, state = workflow.act(observation, state, mode="eval")
            return action

        returns += play_episodes(envs, list(range(start, start + NUM_ENVS)), act).returns.tolist()
    envs.close()
    return {
        "return_mean": float(np.mean(returns)), "return_std": float(np.std(returns)), "episodes": len(returns),
        "reconstruction": float(np.mean(errors)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="a run directory of World Models on CarRacing-v3")
    parser.add_argument("--episodes", type=int, default=48)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    prepare_rendering()
    pooled = find_spec("envpool") is not None
    milliseconds = {"gymnasium": gymnasium_ms(), "rl_lab": vector_ms("sync")}
    if pooled:
        milliseconds["envpool"] = vector_ms("envpool")
    record: dict[str, Any] = {
        "cpu_ms_per_decision": milliseconds,
        "action_repeat": SETTINGS.action_repeat, "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    if asked.run:
        backends = ("sync", "envpool") if pooled else ("sync",)
        record["agent"] = Path(asked.run).parent.name
        record["played"] = {backend: played(asked.run, backend, asked.episodes) for backend in backends}
    write_record("car_racing", record)
    print(record)


if __name__ == "__main__":
    main()

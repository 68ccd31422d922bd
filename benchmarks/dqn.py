"""Env steps a second of DQN on CartPole-v1, and of stable-baselines3's with the same settings where it is installed.

Both learn for the same number of env steps, in turns, on one thread. CPU time is measured, so that other load on the
machine does not count. Run it: python benchmarks/dqn.py [--env-steps 5000] [--rounds 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory


@dataclass(frozen=True)
class Setting:
    """The same run in both libraries. `train_every` env steps are followed by `updates` updates."""

    name: str
    num_envs: int
    units: int
    batch_size: int
    learning_rate: float
    train_every: int
    updates: int
    learning_starts: int
    capacity: int


DEFAULT = {"units": 64, "batch_size": 32, "learning_rate": 1e-4, "learning_starts": 100, "capacity": 100_000}
ZOO = {"units": 256, "batch_size": 64, "learning_rate": 2.3e-3, "learning_starts": 1000, "capacity": 100_000}
SETTINGS = (
    Setting("default, 1 environment", 1, train_every=4, updates=1, **DEFAULT),
    Setting("zoo, 1 environment", 1, train_every=256, updates=128, **ZOO),
    Setting("default, 8 environments", 8, train_every=32, updates=8, **DEFAULT),
    Setting("zoo, 8 environments", 8, train_every=256, updates=128, **ZOO),
)


def rl_lab_speed(setting: Setting, env_steps: int) -> float:
    """Env steps per second of CPU time, the whole loop with replay, metrics and log."""
    with tempfile.TemporaryDirectory() as folder:
        hooks = f"[collect,{{update:{{times:{setting.updates},every:{setting.train_every}}}}}]"
        phase = f"{{name:train,duration_steps:{env_steps},data_source:replay,workflow_hooks:{hooks}}}"
        prepared = prepare(
            [
                "+experiment=dqn", "environment.id=CartPole-v1", "environment.backend=sync", "experiment.device=cpu",
                f"environment.num_envs={setting.num_envs}", f"controllers.q.units={setting.units}",
                f"workflow.batch_size={setting.batch_size}", f"optimizers.main.lr={setting.learning_rate}",
                f"data_sources.replay.capacity={setting.capacity}", "workflow.epsilon_steps=1000",
                f"data_sources.replay.start_after={setting.learning_starts}", f"training.phases=[{phase}]",
                f"training.total_timesteps={env_steps}", "checkpoint.every=1000000000", "logging.console=off",
                "logging.tensorboard=false", "training.threads=1", f"run_root={folder}",
            ]
        )  # fmt: skip
        orchestrator = build(prepared, RunDirectory.create(folder, "speed", 0)).orchestrator
        start = time.process_time()
        orchestrator._loop()  # the loop alone: no checkpoint, final evaluation or report
        elapsed = time.process_time() - start
        orchestrator.close()
    return env_steps / elapsed


def sb3_speed(setting: Setting, env_steps: int) -> float:
    """The same in stable-baselines3."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    model = DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=setting.num_envs, seed=0),
        learning_rate=setting.learning_rate,
        batch_size=setting.batch_size,
        buffer_size=setting.capacity,
        learning_starts=setting.learning_starts,
        train_freq=setting.train_every // setting.num_envs,  # counted in steps of all environments together
        gradient_steps=setting.updates,
        exploration_fraction=min(1.0, 1000 / env_steps),
        policy_kwargs={"net_arch": [setting.units, setting.units]},
        device="cpu",
        seed=0,
    )
    start = time.process_time()
    model.learn(env_steps)
    return env_steps / (time.process_time() - start)


def measure(env_steps: int, rounds: int) -> list[dict[str, Any]]:
    """Best of `rounds` for each setting."""
    torch.set_num_threads(1)
    has_sb3 = importlib.util.find_spec("stable_baselines3") is not None
    rows = []
    for setting in SETTINGS:
        own, other = 0.0, 0.0
        rl_lab_speed(setting, 1500)  # the first updates of a process load half of torch
        if has_sb3:
            sb3_speed(setting, 1500)
        for _ in range(rounds):
            own = max(own, rl_lab_speed(setting, env_steps))
            other = max(other, sb3_speed(setting, env_steps)) if has_sb3 else 0.0
        row: dict[str, Any] = {"setting": setting.name, "env_steps_per_s": round(own, 1)}
        if has_sb3:
            row |= {"sb3_env_steps_per_s": round(other, 1), "ratio": round(own / other, 2)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-steps", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.env_steps, arguments.rounds)
    for row in rows:
        against = (
            f", stable-baselines3 {row['sb3_env_steps_per_s']:,.0f}: {row['ratio']:.2f} ×" if "ratio" in row else ""
        )
        print(f"{row['setting']:<26} {row['env_steps_per_s']:>9,.0f} env steps/s{against}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"benchmark": "dqn", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Times two programs that do the same work, in turns, so that other load on the machine meets both alike."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rl_lab.experiment.build import build
from rl_lab.experiment.prepare import prepare
from rl_lab.orchestration.run_directory import RunDirectory

HAS_SB3 = importlib.util.find_spec("stable_baselines3") is not None
QUIET = [
    "logging.console=off", "logging.tensorboard=false", "experiment.device=cpu", "training.threads=1",
    "evaluation.every=100_000_000", "checkpoint.every=100_000_000",
]  # fmt: skip
Work = Callable[[], object]


@contextmanager
def rl_lab_loop(overrides: list[str]) -> Iterator[Work]:
    """The whole loop as `rl-lab train` runs it, metrics included; without evaluation and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare([*overrides, *QUIET, f"run_root={folder}"])
        orchestrator = build(prepared, RunDirectory.create(folder, "speed", 0)).orchestrator
        yield orchestrator._loop
        orchestrator.close()


def rates(work: Work, env_steps: int) -> tuple[float, float]:
    """Env steps per second of wall and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return env_steps / (time.perf_counter() - wall), env_steps / (time.process_time() - cpu)


def compare(name: str, ours: Callable[[int], tuple], theirs: Callable[[int], tuple], arguments: Any) -> dict[str, Any]:
    """Medians over the rounds, and the median of the rounds' ratios. Each takes env steps and gives its rates."""
    for speed in (ours, theirs) if HAS_SB3 else (ours,):
        speed(1_500)  # the first updates of a process load half of torch
    steps = arguments.env_steps
    rounds = [(ours(steps), theirs(steps) if HAS_SB3 else ()) for _ in range(arguments.rounds)]
    row: dict[str, Any] = {"setting": name}
    for index, clock in enumerate(("wall", "cpu")):
        row[clock] = {"rl_lab": round(median(own[index] for own, _ in rounds), 1)}
        if HAS_SB3:
            row[clock]["sb3"] = round(median(other[index] for _, other in rounds), 1)
            row[clock]["ratio"] = round(median(own[index] / other[index] for own, other in rounds), 2)
    text = []
    for clock in ("wall", "cpu"):
        against = f" against {row[clock]['sb3']:,.0f}: × {row[clock]['ratio']}" if HAS_SB3 else ""
        text.append(f"{clock} {row[clock]['rl_lab']:,.0f}{against}")
    print(f"{name:<44} env steps/s: {'; '.join(text)}", flush=True)
    return row


def arguments(description: str) -> argparse.Namespace:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--env-steps", type=int, default=10_000, help="of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args()


def write(path: Path | None, benchmark: str, rows: list[dict[str, Any]]) -> None:
    if path is None:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if HAS_SB3:
        import stable_baselines3

        versions["stable_baselines3"] = stable_baselines3.__version__
    result = {
        "name": benchmark, "environment": "CartPole-v1", "threads": 1, "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1), "versions": versions, "commit": commit.stdout.strip(),
        "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")

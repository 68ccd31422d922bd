"""Every planner in every model, on CartPole-v1 and Pendulum-v1: scores of fresh episodes, or why there is none.

Each model is trained once (or taken from --run-root, where a finished run of its experiment lies); then each planner is
put on it, as `rl-lab eval RUN --planner NAME key=value` does. All play the same episodes, with about the same number of
imagined sequences for a decision. What RL Lab refuses is the reason in that cell.
Run it: python benchmarks/planner_matrix.py [--run-root DIR] [--episodes N] [--json results/matrix/planners.json]
and with --column "RSSM (Dreamer v1)" for the columns of one model alone, or --row "its own" diffusion for some rows:
these are measured anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import ConfigError
from rl_lab.experiment.evaluate import evaluate_run
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.run_directory import RunDirectory, git_commit, list_runs

SEED = 0  # of the episodes
OWN = "its own"  # what the agent does that was trained: its own planner, or its policy


@dataclass(frozen=True)
class Model:
    """A column: where the model comes from, and what any planner needs to know of it."""

    environment: str
    name: str
    experiment: str
    settings: dict[str, float]
    has_policy: bool = True  # and a value


MODELS = (
    Model("CartPole-v1", "Known equations", "mpc_cartpole", {"horizon": 15}, False),
    Model("CartPole-v1", "Ensemble", "mbmpc_cartpole", {"horizon": 15, "discount": 0.99}),
    Model("CartPole-v1", "RSSM (DreamerV3)", "dreamer_v3_cartpole", {"horizon": 5, "discount": 0.997}),
    Model("CartPole-v1", "TD-MPC2", "tdmpc2_cartpole", {"horizon": 3, "discount": 0.99}),
    Model("Pendulum-v1", "Known equations", "mpc_pendulum", {"horizon": 20}, False),
    Model("Pendulum-v1", "Ensemble", "mbmpc_pendulum", {"horizon": 15, "discount": 0.95}),
    Model("Pendulum-v1", "RSSM (Dreamer v1)", "dreamer_v1_pendulum", {"horizon": 5, "discount": 0.95}),
    Model("Pendulum-v1", "TD-MPC2", "tdmpc2_pendulum", {"horizon": 3, "discount": 0.975}),
)
SAMPLING = {"samples": 64, "iterations": 3}
PLANNERS: dict[str, dict[str, Any]] = {
    "random_shooting": {"samples": 192},
    "cem": SAMPLING | {"elites": 8, "init_std": 1.0},
    "icem": SAMPLING | {"elites": 8, "init_std": 1.0, "execute": "mean"},
    "mppi": SAMPLING | {"std": 1.0},
    "gradient": {"restarts": 8, "iterations": 8, "init_std": 1.5},
    "policy_guided": SAMPLING | {"elites": 8, "policy_samples": 8},
    "mcts": {"simulations": 64},
    "diffusion": {"samples": 64, "scored": 3},
}
# A tree has no horizon. Where a model has neither policy nor value, random actions stand in for both.
TREE_WITHOUT_POLICY = {"prior": "uniform", "leaf_value": "rollout"}
# MPPI's temperature is in units of the return: a step of CartPole pays 1 whatever is done, one of Pendulum up to -16.
# Pendulum's torques are worth trying for longer than a step.
BY_ENVIRONMENT: dict[str, dict[str, dict[str, Any]]] = {
    "CartPole-v1": {"mppi": {"temperature": 0.03}},
    "Pendulum-v1": {
        "random_shooting": {"noise_beta": 1.0},
        "cem": {"noise_beta": 1.0},
        "mppi": {"temperature": 0.3, "noise_beta": 1.0},
        "policy_guided": {"noise_beta": 1.0},
        "mcts": {"sampled_actions": 16},
        "diffusion": {"noise_beta": 1.0},
    },
}


def settings(model: Model, planner: str) -> list[str]:
    """key=value of a cell's planner."""
    merged = PLANNERS[planner] | model.settings | BY_ENVIRONMENT[model.environment].get(planner, {})
    if planner == "mcts":
        horizon = merged.pop("horizon")
        merged |= {} if model.has_policy else TREE_WITHOUT_POLICY | {"rollout_length": horizon}
    return [f"{key}={value}" for key, value in merged.items()]


def trained(model: Model, run_root: Path) -> RunDirectory:
    """The newest finished run of the model's experiment; a new one where there is none."""
    runs = [run for run in list_runs(run_root) if run.path.parent.name == model.experiment]
    done = [run for run in runs if run.info().get("status") == "completed"]
    if done:
        return done[-1]
    print(f"training {model.experiment}", flush=True)
    outcome = run_training([f"+experiment={model.experiment}", f"run_root={run_root}", "logging.console=off"])
    return RunDirectory(outcome.folder)


def cell(model: Model, run: RunDirectory, planner: str, episodes: int) -> dict[str, Any]:
    """A score, or the reason why there is none."""
    chosen = None if planner == OWN else planner
    given = settings(model, planner) if chosen else []
    entry = {"environment": model.environment, "model": model.name, "planner": planner, "settings": given}
    begin = time.process_time()
    try:
        result = evaluate_run(run.path, episodes=episodes, seed=SEED, planner=chosen, planner_settings=given).result
    except ConfigError as error:
        return entry | {"reason": str(error).split(". ")[0].rstrip(".")}
    decisions = sum(result.lengths)
    return entry | {
        "return_mean": round(result.return_mean, 1),
        "return_std": round(result.return_std, 1),
        "episodes": episodes,
        "cpu_ms_per_decision": round(1e3 * (time.process_time() - begin) / decisions, 2),
    }


def model_facts(model: Model, run: RunDirectory) -> dict[str, Any]:
    summary, info = json.loads(run.summary_json.read_text()), run.info()
    return {
        "environment": model.environment,
        "model": model.name,
        "experiment": model.experiment,
        "seed": int(run.path.name.rpartition("-s")[2]),
        "env_steps": summary["env_steps"],
        "commit": info.get("commit"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-root", type=Path, default=Path("experiments"), help="where runs are kept")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write the result; cells that it has already are kept")
    parser.add_argument("--column", choices=sorted({model.name for model in MODELS}), help="measure these cells anew")
    parser.add_argument("--row", nargs="+", choices=(OWN, *PLANNERS), default=[], help="measure these cells anew")
    parser.add_argument("--jobs", type=int, default=1, help="models that are trained at a time")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    cells = {(entry["environment"], entry["model"], entry["planner"]): entry for entry in before.get("cells", [])}
    for entry in cells.values():  # measured before: with the commit of then
        entry.setdefault("commit", before.get("commit"))
    models = {(entry["environment"], entry["model"]): entry for entry in before.get("models", [])}
    chosen = [model for model in MODELS if asked.column in (None, model.name)]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(trained, run_root=asked.run_root), chosen))
    for model in chosen:
        run = trained(model, asked.run_root)
        models[model.environment, model.name] = model_facts(model, run)
        for planner in (OWN, *PLANNERS):
            key = (model.environment, model.name, planner)
            if asked.row and planner not in asked.row:
                continue
            if key not in cells or asked.column or asked.row:
                cells[key] = cell(model, run, planner, asked.episodes) | {"commit": git_commit()}
                print(" | ".join(str(cells[key].get(name, "")) for name in (*cells[key],)), flush=True)
            if asked.json:
                write(asked.json, list(models.values()), list(cells.values()))


def write(path: Path, models: list[dict[str, Any]], cells: list[dict[str, Any]]) -> None:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    facts = {"benchmark": "planner_matrix", "commit": git_commit(), "versions": versions}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "models": models, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()

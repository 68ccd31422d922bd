"""The diffusion planner against its prior and CEM in the same learned model: returns, effective samples and KL by β.

For each seed an ensemble and a prior learn from the same noisy demonstrations (`diffusion_planner_pendulum`); then each
planner plays the same fresh episodes, with few and with many model steps for a decision. The prior alone is β = 0, and
the prior as a policy, which needs no model at all. Interrupted, the same command goes on with the seeds that FILE does
not have yet.
Run it: python benchmarks/diffusion_planner.py [--seeds 4 5 6] [--episodes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rl_lab.components.planners.base import Plan, Planner
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.build import make_eval_envs
from rl_lab.experiment.train import run_training
from rl_lab.orchestration.evaluation import evaluate
from rl_lab.orchestration.run_directory import RunDirectory, git_commit, list_runs

EXPERIMENT = "diffusion_planner_pendulum"
HORIZON = 20
BUDGETS = ((4, 1), (8, 2), (32, 3))  # candidates and rollouts of each; times HORIZON: model steps of a decision
BETAS = (3.0, 10.0, 30.0)
PRIOR = "prior as a policy"
Row = tuple[str | None, dict[str, Any]]  # without a planner the prior plays as a policy


def planned(samples: int, rounds: int) -> list[Row]:
    """The diffusion planner by β, and CEM, with as many model steps."""
    given = {"horizon": HORIZON, "samples": samples}
    diffusion = given | {"prior": "@controllers.prior", "steps": 8, "scored": rounds}
    cem = given | {"iterations": rounds, "elites": max(2, samples // 8), "init_std": 1.0, "noise_beta": 1.0}
    tilted: list[Row] = [("diffusion", diffusion | {"execute": "mean", "beta": beta}) for beta in BETAS]
    return [("diffusion", diffusion | {"execute": "sample", "beta": 0.0}), *tilted, ("cem", cem)]


ROWS: list[Row] = [(None, {}), *(row for budget in BUDGETS for row in planned(*budget))]


def trained(seed: int, run_root: Path) -> RunDirectory:
    """The newest finished run of this seed; a new one where there is none."""
    for run in reversed(list_runs(run_root)):
        is_it = run.path.parent.name == EXPERIMENT and run.path.name.endswith(f"-s{seed}")
        if is_it and run.info().get("status") == "completed":
            return run
    arguments = [f"+experiment={EXPERIMENT}", f"experiment.seed={seed}", f"run_root={run_root}", "logging.console=off"]
    short = ["evaluation.episodes=1", "evaluation.final_episodes=1", "evaluation.video=false"]  # it is played below
    return RunDirectory(run_training([*arguments, *short]).folder)


def played(
    run: RunDirectory, episodes: int, seed: int, planner: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The return of fresh episodes, and the means of what the planner says of its plans. Without a planner the prior
    plays as a policy."""
    given = [f"{key}={value}" for key, value in settings.items()]
    loaded = load_run(run.path, planner=planner, planner_settings=given)
    torch.set_num_threads(1)
    said: dict[str, list[float]] = defaultdict(list)
    actor: Any = loaded.workflow
    if planner is None:
        actor = loaded.workflow.context.controllers.acting("prior")
    else:
        record_plans(loaded.workflow.planner, said)  # type: ignore[attr-defined]
    envs = make_eval_envs(loaded.settings, "final", render=False, seed=seed, episodes=episodes)
    begin = time.process_time()
    try:
        result = evaluate(actor, envs, episodes, seed=seed, stream="final")
    finally:
        envs.close()
    assert result is not None
    cpu = 1e3 * (time.process_time() - begin) / sum(result.lengths)
    means = {name: round(fmean(values), 2) for name, values in said.items()}
    return {"return_mean": round(result.return_mean, 1), "cpu_ms_per_decision": round(cpu, 2), **means}


def record_plans(planner: Planner, said: dict[str, list[float]]) -> None:
    """Keep the metrics of every plan that is made."""
    plan = planner.plan

    def recorded(*arguments: Any, **keywords: Any) -> Plan:
        made = plan(*arguments, **keywords)
        for name, value in made.metrics().items():
            said[name].append(float(value.mean()))
        return made

    planner.plan = recorded  # type: ignore[method-assign]


def measured(seed: int, run_root: Path, episodes: int) -> list[dict[str, Any]]:
    """A seed's model, and what each row does in it."""
    torch.set_num_threads(1)
    run, found = trained(seed, run_root), []
    for planner, settings in ROWS:
        found.append({"seed": seed, **played(run, episodes, seed, planner, settings)})
        print(seed, planner or PRIOR, settings.get("beta", ""), found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-root", type=Path, default=Path("experiments"), help="where runs are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6])
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--json", type=Path, help="where to write the result")
    asked = parser.parse_args()
    facts = {
        "benchmark": "diffusion_planner", "experiment": EXPERIMENT, "environment": "Pendulum-v1",
        "episodes": asked.episodes, "commit": git_commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    by_seed = measured_before(asked.json, facts) if asked.json else {}
    missing = [seed for seed in asked.seeds if seed not in by_seed]
    work = partial(measured, run_root=asked.run_root, episodes=asked.episodes)
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        for seed, found in zip(missing, pool.map(work, missing), strict=True):
            by_seed[seed] = found
            if asked.json:
                write(asked.json, facts, [by_seed[seed] for seed in sorted(by_seed)])


def blank_rows() -> list[dict[str, Any]]:
    """The rows of the results file, without their seeds."""
    return [
        {"planner": planner or PRIOR, "settings": settings, "model_steps": model_steps(settings)}
        for planner, settings in ROWS
    ]


def model_steps(settings: dict[str, Any]) -> int:
    """Of one decision."""
    rounds = settings.get("scored", settings.get("iterations", 0))
    return HORIZON * settings.get("samples", 0) * rounds


def measured_before(path: Path, facts: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The rows of each seed in a file of the same commit, episodes and settings; none where there is no such file."""
    if not path.exists():
        return {}
    known = json.loads(path.read_text())
    rows = known.pop("rows")
    if known != facts or [{**row, "seeds": None} for row in rows] != [{**row, "seeds": None} for row in blank_rows()]:
        return {}
    return {row["seed"]: [other["seeds"][number] for other in rows] for number, row in enumerate(rows[0]["seeds"])}


def write(path: Path, facts: dict[str, Any], by_seed: list[list[dict[str, Any]]]) -> None:
    """The rows, each with what was measured of every seed so far."""
    rows = [{**row, "seeds": [found[number] for found in by_seed]} for number, row in enumerate(blank_rows())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""`rl-lab reproduce`: trains the seeds of an experiment, evaluates them by the protocol and writes results/.

What was done is read off the run directories, so an interrupted reproduction goes on: finished seeds are kept, a seed
that was cut off is resumed, the others are trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.errors import RLLabError
from rl_lab.experiment.engines import engine
from rl_lab.experiment.gpu_sharing import shared_gpu
from rl_lab.experiment.jobs import Job, Start, run_jobs
from rl_lab.experiment.prepare import Prepared, prepare
from rl_lab.experiment.results import (
    chosen_actions,
    curve_file,
    environment_versions,
    read_results,
    result_row,
    write_results,
)
from rl_lab.experiment.resume import runs_with
from rl_lab.orchestration.run_directory import RunDirectory

Say = Callable[[str], object]
FINAL_SEED = 1_000_003  # of the episodes that every run of every seed is scored on
SEEDS = (
    f"one set for all runs, derived from ({FINAL_SEED}, stream 'final', environment index, episode number); used "
    "neither in training nor in the evaluations while training"
)
LOGS = ".reproduce"  # under run_root


@dataclass(frozen=True)
class SeedPlan:
    """The command that trains one seed, and the marks by which its run is recognised."""

    seed: int
    overrides: tuple[str, ...]
    run_root: Path
    name: str

    def run(self) -> RunDirectory | None:
        """The newest run that was started with these very overrides."""
        runs = runs_with(self.run_root, overrides=list(self.overrides))
        return runs[-1] if runs else None

    def is_done(self) -> bool:
        run = self.run()
        return run is not None and run.info().get("status") == "completed" and run.summary_json.is_file()

    def train_command(self) -> list[str]:
        run = self.run()
        if run is None:
            return ["train", *self.overrides]
        return ["train", f"training.resume_path={run.path}", f"run_root={self.run_root}"]


def reproduce(
    experiment: str,
    *,
    overrides: Sequence[str] = (),
    seeds: Sequence[int],
    jobs: int | None = None,
    episodes: int = 100,
    results: Path = Path("results"),
    config_dirs: Sequence[Path] = (),
    launcher: str | None = None,
    options: Mapping[str, Any] | None = None,
    say: Say,
) -> Path:
    """Train and evaluate every seed that is missing, then write the file. Raises where a seed failed.

    `launcher` (joblib, submitit or ray) runs them elsewhere, with its own `options`.
    """
    prepared = prepare([f"+experiment={experiment}", *overrides], config_dirs=config_dirs)
    plans = [_plan(prepared, experiment, overrides, seed) for seed in seeds]
    folders = [word for folder in config_dirs for word in ("--config-dir", str(folder))]
    logs = Path(prepared.config["run_root"]) / LOGS
    missing = [plan for plan in plans if not plan.is_done()]
    say(f"{experiment}: {len(plans) - len(missing)} of {len(plans)} seeds are trained already")
    start = engine(launcher, options or {}, folder=logs) if launcher is not None else None
    on_gpu = launcher is None and _computes_on_gpu(prepared)
    at_once = jobs or (_default_jobs(on_gpu) if launcher is None else len(plans))  # an engine has a queue of its own
    training = [
        Job(f"seed {plan.seed}", [*plan.train_command(), *folders], logs / f"{plan.name}-s{plan.seed}.log")
        for plan in missing
    ]
    with shared_gpu(say=say) if on_gpu and at_once > 1 else nullcontext():
        failed = run_jobs(training, at_once=at_once, say=say, start=start)
        done = [plan for plan in plans if plan.is_done()]
        if not done:
            raise RLLabError("; ".join(failed) + ". There is nothing to write yet.")
        scores = _evaluate(done, episodes=episodes, logs=logs, at_once=at_once, say=say, start=start)
    path = _write(experiment, prepared, overrides, done, scores, episodes=episodes, results=results)
    if failed:
        raise RLLabError("; ".join(failed) + ". The other seeds are in " + str(path))
    return path


def _plan(prepared: Prepared, experiment: str, overrides: Sequence[str], seed: int) -> SeedPlan:
    lines = (f"+experiment={experiment}", *overrides, f"experiment.seed={seed}")
    name = prepared.settings.experiment.name
    assert name is not None
    return SeedPlan(seed, lines, Path(prepared.config["run_root"]), name)


def _computes_on_gpu(prepared: Prepared) -> bool:
    from rl_lab.experiment.device import resolve_device  # it imports torch, which takes a second

    return resolve_device(prepared.settings.experiment.device).type == "cuda"


def _default_jobs(on_gpu: bool) -> int:
    """One seed per core on the CPU, where a run uses one thread; one at a time on a GPU."""
    return 1 if on_gpu else max(1, len(os.sched_getaffinity(0)))


def _evaluate(
    plans: Sequence[SeedPlan], *, episodes: int, logs: Path, at_once: int, say: Say, start: Start | None
) -> dict[int, dict[str, Any]]:
    """The held-out episodes of every trained seed, as it is evaluated and as it acts in training, each in a process of
    its own."""
    jobs, outputs = [], {}
    for plan in plans:
        run = plan.run()
        assert run is not None
        for option, name in (((), ""), (("--as-in-training",), "-as-in-training")):
            output = outputs[plan.seed, name] = logs / f"{plan.name}-s{plan.seed}{name}.json"
            played = ["--episodes", str(episodes), "--seed", str(FINAL_SEED), *option]
            jobs.append(Job(f"evaluation of seed {plan.seed}", ["eval", str(run.path), *played, "--json"], output))
    failed = run_jobs(jobs, at_once=at_once, say=say, start=start)
    if failed:
        raise RLLabError("; ".join(failed))
    scores = {key: json.loads(path.read_text().strip().splitlines()[-1]) for key, path in outputs.items()}
    return {
        plan.seed: scores[plan.seed, ""] | {"as_in_training": scores[plan.seed, "-as-in-training"]} for plan in plans
    }


def _write(
    experiment: str,
    prepared: Prepared,
    overrides: Sequence[str],
    plans: Sequence[SeedPlan],
    scores: dict[int, dict[str, Any]],
    *,
    episodes: int,
    results: Path,
) -> Path:
    path = results / f"{experiment}.json"
    protocol = _protocol(prepared, episodes)
    overrides = [override for override in overrides if not override.startswith("run_root=")]  # where, not what
    rows = read_results(path, overrides=overrides, protocol=protocol)  # those of other seeds
    for plan in plans:
        run = plan.run()
        assert run is not None
        curve = curve_file(run, results / "curves" / f"{experiment}-s{plan.seed}.csv")
        rows[plan.seed] = result_row(run, plan.seed, scores[plan.seed], curve.relative_to(results).as_posix())
    config = {name: section for name, section in prepared.config.items() if name != "run_root"}
    config["experiment"] = {**config["experiment"], "seed": None}
    write_results(path, experiment=experiment, overrides=overrides, protocol=protocol, config=config, rows=rows)
    return path


def _protocol(prepared: Prepared, episodes: int) -> dict[str, Any]:
    settings = prepared.settings
    best = settings.checkpoint.best
    if settings.evaluation.select == "best":
        selection = f"the agent with the highest {best} in the periodic evaluations while training"
    else:
        selection = "the agent at the end of training"
    return {
        "environment": settings.environment.id,
        "environment_version": environment_versions(settings.environment.id),
        "episodes": episodes,
        "seeds": SEEDS,
        "actions": chosen_actions(prepared.config),
        "selection": selection,
        "summary": "interquartile mean over seeds, 95 % bootstrap interval",
    }

"""Training: a new run, or going on with one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab import ranks
from rl_lab.environments.worker import end_with_parent
from rl_lab.errors import CheckpointError, RLLabError
from rl_lab.experiment import shares
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.config import parse_overrides
from rl_lab.experiment.learning_code import digests
from rl_lab.experiment.prepare import Prepared, prepare
from rl_lab.experiment.resume import RESUME_KEY, Resumption, is_over, prepare_resume, runs_with
from rl_lab.orchestration.files import NO_ROOM
from rl_lab.orchestration.periodic_evaluation import StopRule
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.orchestration.signals import ending_at_once

EXIT_REQUEUE = 75  # "temporary failure": Slurm's RequeueExit and its like start the job again


@dataclass(frozen=True)
class Outcome:
    """The end of a training: its exit code and its run directory."""

    code: int
    folder: Path
    pruned: bool = False


def train(
    overrides: Sequence[str] = (), *, config_dirs: Sequence[Path] = (), trust: bool = False, requeue: bool = False
) -> int:
    """Train by these overrides; the process's exit code. `trust`: a run to go on with may name code of its own.

    `requeue`: go on with the newest unfinished run of these very overrides, and end with `EXIT_REQUEUE` where SIGTERM
    stopped it: the same command, given again by a cluster, then takes the run to its end.
    """
    if requeue and not _resumes(overrides):
        run_root = prepare(overrides, config_dirs=config_dirs).config["run_root"]
        unfinished = [run for run in runs_with(run_root, overrides=list(overrides)) if not is_over(run)]
        if unfinished:
            overrides = [f"{RESUME_KEY}={unfinished[-1].path}", f"run_root={run_root}"]
    code = run_training(overrides, config_dirs=config_dirs, trust=trust).code
    if code == 0:  # else another rank may not come
        ranks.leave()
    return EXIT_REQUEUE if requeue and code == 128 + signal.SIGTERM else code


def configuration(overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: bool = False) -> Prepared:
    """The configuration that `train` would use: the composed one, or that of the run to go on with."""
    if _resumes(overrides):
        return prepare_resume(overrides, trust=trust).prepared
    return prepare(overrides, config_dirs=config_dirs)


def run_training(
    overrides: Sequence[str],
    *,
    config_dirs: Sequence[Path] = (),
    trust: bool = False,
    mark: Mapping[str, Any] | None = None,
    stop_rule: StopRule | None = None,
) -> Outcome:
    """Train by these overrides, in a new run or in the one that `training.resume_path` names.

    `mark` tells the run of a sweep: where one that carries it is there already, it is gone on with, and one that is
    over is left as it is. `stop_rule` is asked after each evaluation whether the run should end early.
    """
    try:
        return _train(overrides, config_dirs, trust, mark, stop_rule)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise RLLabError(f"There is no room to write the run: {error}. Free some space, then start again.") from error


def _train(
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    trust: bool,
    mark: Mapping[str, Any] | None,
    stop_rule: StopRule | None,
) -> Outcome:
    if _resumes(overrides):
        return _resume(overrides, trust, stop_rule)
    prepared = prepare(overrides, config_dirs=config_dirs)
    before = runs_with(prepared.config["run_root"], sweep=dict(mark)) if mark is not None else []
    if before:
        if is_over(before[-1]):
            return Outcome(0, before[-1].path, pruned=before[-1].info().get("pruned") is not None)
        return _resume([f"{RESUME_KEY}={before[-1].path}"], trust, stop_rule)
    shares.check(prepared)
    if ranks.is_launched():
        ranks.join()
    run = RunDirectory(ranks.shared(_new_run(prepared, overrides, mark).path if ranks.is_first() else None))
    if shares.wanted(prepared) == ranks.count():
        return _go(prepared, run, None, stop_rule)
    return _on_ranks(shares.Assignment(run.path, [], trust, True, stop_rule), shares.wanted(prepared))


def _resume(overrides: Sequence[str], trust: bool, stop_rule: StopRule | None) -> Outcome:
    resumption = prepare_resume(overrides, trust=trust)
    shares.check(resumption.prepared)
    shares.check_resumption(resumption)
    if ranks.is_launched():
        ranks.join()
    if shares.wanted(resumption.prepared) == ranks.count():
        return _go(resumption.prepared, resumption.run, resumption, stop_rule)
    assignment = shares.Assignment(resumption.run.path, list(overrides), trust, False, stop_rule)
    return _on_ranks(assignment, shares.wanted(resumption.prepared))


def _on_ranks(assignment: shares.Assignment, count: int) -> Outcome:
    code = shares.run_ranks(assignment, count)
    return Outcome(code, assignment.path, pruned=RunDirectory(assignment.path).info().get("pruned") is not None)


def train_share(path: str) -> int:
    """One of the ranks that `run_ranks` started: meet the others and train. `path`: of its assignment."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    assignment = shares.read_assignment(path)
    ranks.join()
    resumption = prepare_resume(assignment.overrides or [f"{RESUME_KEY}={assignment.path}"], trust=assignment.trust)
    before = None if assignment.fresh else resumption
    code = _go(resumption.prepared, resumption.run, before, assignment.stop_rule).code
    if code == 0:
        ranks.leave()
    return code


def _new_run(prepared: Prepared, overrides: Sequence[str], mark: Mapping[str, Any] | None) -> RunDirectory:
    settings = prepared.settings.experiment
    assert settings.name is not None
    # A run keeps the overrides that it was started with: `reproduce` knows it by them.
    return RunDirectory.create(
        prepared.config["run_root"],
        settings.name,
        settings.seed,
        config=prepared.to_yaml(),
        argv=sys.argv,
        overrides=list(overrides),
        **digests(prepared.config),
        **({} if mark is None else {"sweep": dict(mark)}),
    )


def _resumes(overrides: Sequence[str]) -> bool:
    given = {override.key_or_group: override.value() for override in parse_overrides(overrides)}
    return given.get(RESUME_KEY) is not None


def _go(prepared: Prepared, run: RunDirectory, resumption: Resumption | None, stop_rule: StopRule | None) -> Outcome:
    run = run if ranks.is_first() else shares.Follower(run.path)
    with run.lock(), run.required():
        try:
            with ending_at_once():
                experiment = build(shares.share(prepared), run)
        except BaseException:
            if resumption is None and ranks.is_first():  # nothing has happened in it yet
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        experiment.orchestrator.evaluation.stop_rule = stop_rule
        try:
            code = _run(experiment, prepared, run, resumption)
            return Outcome(code, run.path, pruned=experiment.orchestrator.evaluation.pruned is not None)
        except Exception as error:
            error.run_folder = run.path  # type: ignore[attr-defined]  # the command line writes the traceback there
            if resumption is not None and not resumption.is_trusted and not isinstance(error, RLLabError | OSError):
                raise _forged(run, error) from error
            raise
        finally:
            experiment.orchestrator.close()


def _forged(run: RunDirectory, error: Exception) -> CheckpointError:
    """A stranger's checkpoint can hold anything; some of that shows only when it is computed with."""
    return CheckpointError(
        f"{run.path} was not made here, and going on from its checkpoint ended with {type(error).__name__}:"
        f" {' '.join(str(error).split())[:300]}. No checkpoint that RL Lab wrote should do so: ask whoever sent it for"
        " another copy. If you trust it, add --trust, and the traceback is kept."
    )


def _run(experiment: Experiment, prepared: Prepared, run: RunDirectory, resumption: Resumption | None) -> int:
    orchestrator = experiment.orchestrator
    console = orchestrator.recorder.console
    if resumption is not None:
        orchestrator.resume(resumption.checkpoint)
        console.message(resumption.text())
        damaged = run.set_damaged_aside()
        if damaged is not None:
            orchestrator.recorder.event("damaged", damaged)
        run.write_config(prepared.to_yaml(), mark=resumption.is_trusted)
    run.write_text("plan.txt", experiment.plan)
    run.start(
        device=str(experiment.device), parameters=experiment.parameters, argv=sys.argv,
        has_world_model=orchestrator.context.simulator.is_attached,
    )  # fmt: skip
    console.message(experiment.plan)
    return orchestrator.run()

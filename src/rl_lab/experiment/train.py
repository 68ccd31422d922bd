"""Training: a new run, or going on with one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_lab.errors import RLLabError
from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.config import parse_overrides
from rl_lab.experiment.prepare import Prepared, prepare
from rl_lab.experiment.resume import RESUME_KEY, Resumption, prepare_resume
from rl_lab.orchestration.files import NO_ROOM
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.orchestration.signals import ending_at_once


@dataclass(frozen=True)
class Outcome:
    """The end of a training: its exit code and its run directory."""

    code: int
    folder: Path


def train(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path] = (), trust: bool = False) -> int:
    """Train by these overrides; the process's exit code. `trust`: a run to go on with may name code of its own."""
    return run_training(overrides, config_dirs=config_dirs, trust=trust).code


def configuration(overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: bool = False) -> Prepared:
    """The configuration that `train` would use: the composed one, or that of the run to go on with."""
    if _resumes(overrides):
        return prepare_resume(overrides, trust=trust).prepared
    return prepare(overrides, config_dirs=config_dirs)


def run_training(overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), trust: bool = False) -> Outcome:
    """Train by these overrides, in a new run or in the one that `training.resume_path` names."""
    try:
        return _train(overrides, config_dirs, trust)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise RLLabError(f"There is no room to write the run: {error}. Free some space, then start again.") from error


def _train(overrides: Sequence[str], config_dirs: Sequence[Path], trust: bool) -> Outcome:
    if _resumes(overrides):
        resumption = prepare_resume(overrides, trust=trust)
        return _go(resumption.prepared, resumption.run, resumption)
    prepared = prepare(overrides, config_dirs=config_dirs)
    settings = prepared.settings.experiment
    assert settings.name is not None
    # A run keeps the overrides that it was started with: `reproduce` knows it by them.
    run = RunDirectory.create(
        prepared.config["run_root"],
        settings.name,
        settings.seed,
        config=prepared.to_yaml(),
        argv=sys.argv,
        overrides=list(overrides),
    )
    return _go(prepared, run, None)


def _resumes(overrides: Sequence[str]) -> bool:
    given = {override.key_or_group: override.value() for override in parse_overrides(overrides)}
    return given.get(RESUME_KEY) is not None


def _go(prepared: Prepared, run: RunDirectory, resumption: Resumption | None) -> Outcome:
    with run.lock():
        try:
            with ending_at_once():
                experiment = build(prepared, run)
        except BaseException:
            if resumption is None:  # nothing has happened in it yet
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        try:
            return Outcome(_run(experiment, prepared, run, resumption), run.path)
        except Exception as error:
            error.run_folder = run.path  # type: ignore[attr-defined]  # the command line writes the traceback there
            raise
        finally:
            experiment.orchestrator.close()


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
    run.start(device=str(experiment.device), parameters=experiment.parameters, argv=sys.argv)
    console.message(experiment.plan)
    return orchestrator.run()

"""Training: a new run, or going on with one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_lab.experiment.build import Experiment, build
from rl_lab.experiment.config import parse_overrides
from rl_lab.experiment.prepare import Prepared, prepare
from rl_lab.experiment.resume import RESUME_KEY, Resumption, prepare_resume
from rl_lab.orchestration.run_directory import RunDirectory


@dataclass(frozen=True)
class Outcome:
    """How a training ended: the exit code and where the run is."""

    code: int
    folder: Path


def train(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path] = ()) -> int:
    """Train by these overrides; the process's exit code."""
    return run_training(overrides, config_dirs=config_dirs).code


def configuration(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> Prepared:
    """What `train` would run with: the composed configuration, or that of the run to go on with."""
    if _resumes(overrides):
        return prepare_resume(overrides).prepared
    return prepare(overrides, config_dirs=config_dirs)


def run_training(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> Outcome:
    if _resumes(overrides):
        resumption = prepare_resume(overrides)
        return _go(resumption.prepared, resumption.run, overrides, resumption)
    prepared = prepare(overrides, config_dirs=config_dirs)
    settings = prepared.settings.experiment
    assert settings.name is not None
    run = RunDirectory.create(prepared.config["run_root"], settings.name, settings.seed)
    return _go(prepared, run, overrides, None)


def _resumes(overrides: Sequence[str]) -> bool:
    given = {override.key_or_group: override.value() for override in parse_overrides(overrides)}
    return given.get(RESUME_KEY) is not None


def _go(prepared: Prepared, run: RunDirectory, overrides: Sequence[str], resumption: Resumption | None) -> Outcome:
    with run.lock():
        try:
            experiment = build(prepared, run)
        except BaseException:
            if resumption is None:  # nothing has happened in it yet
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        try:
            return Outcome(_run(experiment, prepared, run, overrides, resumption), run.path)
        except Exception as error:
            error.run_folder = run.path  # type: ignore[attr-defined]  # the command line writes the traceback there
            raise
        finally:
            experiment.orchestrator.close()


def _run(
    experiment: Experiment,
    prepared: Prepared,
    run: RunDirectory,
    overrides: Sequence[str],
    resumption: Resumption | None,
) -> int:
    orchestrator = experiment.orchestrator
    console = orchestrator.recorder.console
    if resumption is not None:
        orchestrator.resume(resumption.checkpoint)
        console.message(resumption.text())
    run.write_text("config.yaml", prepared.to_yaml())
    run.write_text("plan.txt", experiment.plan)
    # A run keeps the overrides that it was started with: `reproduce` knows it by them.
    started_with = {} if resumption is not None else {"overrides": list(overrides)}
    run.start(device=str(experiment.device), parameters=experiment.parameters, argv=sys.argv, **started_with)
    console.message(experiment.plan)
    return orchestrator.run()

"""Runs that tests make in several parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_lab.experiment.train import run_training


def run_in_parts(overrides: Sequence[str], *, first: int, total: int) -> Path:
    """The folder of a run that ended after `first` env steps and was resumed to `total`. It has no report: drawing one
    takes longer than all else in a very small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
        part = run_training([*overrides, f"training.total_timesteps={first}"])
        resume = [f"training.resume_path={part.folder}", f"training.total_timesteps={total}", "logging.console=off"]
        resumed = run_training(resume)
    assert (part.code, resumed.code) == (0, 0)
    assert resumed.folder == part.folder
    return part.folder

"""Runs that tests make in several parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def stopped_and_killed(words: Sequence[str], folder: Path) -> Path:
    """The folder of a run that was ended by SIGTERM, gone on with, killed, and gone on with to its end: each time by
    the command line in a process of its own. A row of metrics every tenth of the run, and a checkpoint every fifth."""
    first = start_training([*words, "run_root=parts"], folder)
    wait_for_rows(folder / "parts", 3)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=100) == 143
    run = next((folder / "parts").glob("*/*"))
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    second = start_training([f"training.resume_path={run}"], folder)
    wait_for_rows(folder / "parts", 6)
    second.kill()
    second.wait()
    time.sleep(1.5)  # its ranks and workers notice that they are alone
    assert start_training([f"training.resume_path={run}"], folder).wait(timeout=200) == 0
    return run


def start_training(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "rl_lab", "train", *words]
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": path})


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if sum(len(path.read_bytes().splitlines()) for path in folder.glob("*/*/metrics.jsonl")) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"never {count} rows")


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All rows of metrics, without the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "wall_s" and not k.startswith("time/")} for line in lines]

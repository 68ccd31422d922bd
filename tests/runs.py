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


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "wall_s" and "time/" not in key} for row in lines]


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


def assert_goes_on_exactly(overrides: Sequence[str], workflow: type, hook: str, *, killed_at: int, root: Path) -> None:
    """A run that dies in the `killed_at`th call of a hook and is resumed has the metrics of one that never stopped."""
    plain, calls = getattr(workflow, hook), []

    def dying(self: Any, batch: Any, *, phase: Any) -> Any:
        calls.append(1)
        if len(calls) == killed_at:
            raise RuntimeError("killed")
        return plain(self, batch, phase=phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_lab.metrics.report.write_report", lambda folder: folder / "report.html")
        whole = run_training([*overrides, f"run_root={root}/whole"]).folder
        patch.setattr(workflow, hook, dying)
        with pytest.raises(RuntimeError, match="killed"):
            run_training([*overrides, f"run_root={root}/killed"])
        (run,) = (root / "killed").glob("*/*")
        run_training([f"training.resume_path={run}", "logging.console=off"])
    assert rows(run) == rows(whole)

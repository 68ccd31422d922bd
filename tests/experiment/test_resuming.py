"""Going on with a run: the metrics are those of the run that was never stopped; safe overrides are listed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.overrides import QUIET, RANDOM, TINY_DREAMER
from tests.runs import run_in_parts

from rl_lab.experiment.train import run_training


def metrics(run: Path) -> list[dict[str, object]]:
    """metrics.jsonl without the wall clock; a line that is being written is left out."""
    path = run / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []
    )
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]


def test_a_longer_budget_equals_the_run_that_had_it_from_the_start(tmp_path: Path) -> None:
    """80 steps, then resumed to 120, gives the rows of 120 steps at once (the ends of both runs aside)."""
    base = [*TINY_DREAMER[:-1], *QUIET, "logging.every=20", "evaluation.imagination=false"]
    whole = run_training([*base, "training.total_timesteps=120", f"run_root={tmp_path}/a"]).folder
    part = run_in_parts([*base, f"run_root={tmp_path}/b"], first=80, total=120)
    seen = {row["env_steps"]: row for row in metrics(part) if "train/loss/total" in row}
    expected = {row["env_steps"]: row for row in metrics(whole) if "train/loss/total" in row}
    assert len(expected) > 2
    assert seen == expected
    assert json.loads((part / "summary.json").read_text())["env_steps"] == 120


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """SIGKILL in the middle, then resume: every metric is that of the run that was never killed."""
    base = [*TINY_DREAMER[:-1], *QUIET, "logging.every=4", "checkpoint.every=32", "evaluation.every=48"]
    base += ["training.total_timesteps=160", "evaluation.imagination=false"]
    whole = run_training([*base, f"run_root={tmp_path}/whole"]).folder
    command = [sys.executable, "-m", "rl_lab", "train", *base, f"run_root={tmp_path}/killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any(row["env_steps"] >= 88 for run in tmp_path.glob("killed/*/*") for row in metrics(run)):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    run = next(tmp_path.glob("killed/*/*"))
    assert not (run / "summary.json").exists()
    run_training([f"training.resume_path={run}"])
    assert metrics(run) == metrics(whole)


def test_accepted_overrides_are_listed(random_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user sees what was changed, and the run's configuration records it."""
    run = tmp_path / "random" / random_run.name
    shutil.copytree(random_run, run, symlinks=True)
    run_training([f"training.resume_path={run}", "training.total_timesteps=120", "logging.console=off"])
    assert "these overrides: training.total_timesteps=120, logging.console=off" in capsys.readouterr().out
    assert "total_timesteps: 120" in (run / "config.yaml").read_text()
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 120


def test_a_complete_run_says_that_nothing_is_left(
    random_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Going on with it without a larger budget trains nothing: it is told, and how to train on."""
    run = Path(shutil.copytree(random_run, tmp_path / "random" / random_run.name, symlinks=True))
    assert run_training([f"training.resume_path={run}", "logging.console=off"]).code == 0
    assert "It is complete" in (told := capsys.readouterr().out)
    assert "training.total_timesteps=N, above 80" in told
    run_training([f"training.resume_path={run}", "training.total_timesteps=120", "logging.console=off"])
    assert "It is complete" not in capsys.readouterr().out


def test_a_run_that_was_killed_while_it_was_built_starts_again_in_place(tmp_path: Path) -> None:
    """From the moment that a directory has its name, it holds the configuration."""
    from rl_lab.experiment.prepare import prepare
    from rl_lab.orchestration.run_directory import RunDirectory, list_runs

    prepared = prepare([*RANDOM, *QUIET])
    run = RunDirectory.create(tmp_path, "random", 0, config=prepared.to_yaml(), overrides=list(RANDOM))
    assert [found.path for found in list_runs(tmp_path)] == [run.path]
    outcome = run_training([f"training.resume_path={run.path}"])
    assert (outcome.code, outcome.folder) == (0, run.path)
    assert (run.info()["status"], run.info()["overrides"]) == ("completed", list(RANDOM))


def test_a_run_directory_deleted_while_the_run_is_built_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever looks for a file in it first, the error says that the directory is gone."""
    from rl_lab.errors import RLLabError
    from rl_lab.experiment import plan

    needed = plan.require_room

    def delete(needs: object, device: object, folder: Path) -> None:
        shutil.rmtree(folder)
        needed(needs, device, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "require_room", delete)
    with pytest.raises(RLLabError, match="is gone: it was deleted or moved"):
        run_training([*RANDOM, *QUIET, f"run_root={tmp_path}"])
    assert not list(tmp_path.glob("*/*"))


def test_a_signal_while_a_run_is_built_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with the signal's status, and no run is left that would claim to be running."""
    import os
    import signal

    monkeypatch.setattr("rl_lab.experiment.train.build", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        run_training([*RANDOM, *QUIET, f"run_root={tmp_path}"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("*/*"))

"""Results: every seed trained and evaluated, an interrupted reproduction goes on, the file has what DESIGN promises."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tests.overrides import QUIET

from rl_lab.cli.reproduce import parse_seeds
from rl_lab.errors import RLLabError
from rl_lab.experiment import jobs
from rl_lab.experiment.reproduce import reproduce

OVERRIDES = ["environment.id=CartPole-v1", "training.total_timesteps=80", "evaluation.every=40", *QUIET]
ROW = {
    "seed",
    "return_mean",
    "return_std",
    "env_steps",
    "frames",
    "updates",
    "wall_s",
    "device",
    "commit",
    "curve",
    "phases",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs the jobs in this process, and notes their commands."""
    from rl_lab.cli.main import main

    commands: list[str] = []

    def run_here(entries: list[jobs.Job], *, at_once: int, say: object, start: object) -> list[str]:
        import contextlib

        failed = []
        for job in entries:
            commands.append(" ".join(job.arguments))
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with open(job.log, "w") as log, contextlib.redirect_stdout(log):
                if main(list(job.arguments)):
                    failed.append(f"{job.name} failed")
        return failed

    monkeypatch.setattr("rl_lab.experiment.reproduce.run_jobs", run_here)
    return commands


def test_results_have_the_promised_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    """One row a seed with all keys, the protocol, the interval, and a curve file; a second call trains nothing."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    results = tmp_path / "results"
    first = reproduce("random", overrides=OVERRIDES, seeds=[0, 1], episodes=3, results=results, say=said.append)
    content = json.loads(first.read_text())
    assert first == tmp_path / "results" / "random.json"
    assert {"experiment", "overrides", "protocol", "rows", "iqm", "ci95"} <= set(content)
    assert [row["seed"] for row in content["rows"]] == [0, 1]
    assert all(set(row) >= ROW for row in content["rows"])
    assert content["protocol"]["episodes"] == 3
    evaluations = [command for command in started if command.startswith("eval")]
    assert len({command.partition("--seed ")[2].split()[0] for command in evaluations}) == 1  # the same for each run
    assert sum("--as-in-training" in command for command in evaluations) == 2
    assert content["protocol"]["environment_version"]["gymnasium"]
    low, high = content["ci95"]
    assert low <= content["iqm"] <= high
    with open(tmp_path / "results" / content["rows"][0]["curve"]) as file:
        assert [row["env_steps"] for row in csv.DictReader(file) if row["eval/return_mean"]] == ["40", "80"]

    del started[:]
    reproduce("random", overrides=OVERRIDES, seeds=[0, 1, 2], episodes=3, results=results, say=said.append)
    assert [command.split()[0] for command in started] == ["train", *["eval"] * 6]
    assert "experiment.seed=2" in started[0]


def test_a_seed_that_was_cut_off_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    """Its run is gone on with, not begun anew, and counts like any other."""
    monkeypatch.chdir(tmp_path)
    reproduce("random", overrides=OVERRIDES, seeds=[0], episodes=1, results=tmp_path / "results", say=lambda text: None)
    run = next(tmp_path.glob("experiments/random/*/run.json"))
    run.write_text(json.dumps(json.loads(run.read_text()) | {"status": "interrupted"}))
    del started[:]
    path = reproduce(
        "random", overrides=OVERRIDES, seeds=[0], episodes=1, results=tmp_path / "results", say=lambda text: None
    )
    assert started[0].startswith(f"train training.resume_path={run.parent.relative_to(tmp_path)}")
    assert [row["seed"] for row in json.loads(path.read_text())["rows"]] == [0]


def test_jobs_run_and_report(tmp_path: Path) -> None:
    """Real processes: what fails is named with its last line, the others go through."""
    said: list[str] = []
    entries = [
        jobs.Job("good", ["--version"], tmp_path / "good.log"),
        jobs.Job("bad", ["nonsense"], tmp_path / "bad.log"),
    ]
    failed = jobs.run_jobs(entries, at_once=2, say=said.append)
    assert len(failed) == 1
    assert "bad failed: 'nonsense' is not a command" in failed[0]
    assert (tmp_path / "good.log").read_text().startswith("rl-lab ")


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (2, "seed 0 failed: no such key"),
        (143, "seed 0 was interrupted;"),
        (-9, "seed 0 was killed by SIGKILL"),
    ],
)
def test_a_failure_is_told_from_an_interruption(tmp_path: Path, status: int, sentence: str) -> None:
    """By the exit status; of the messages our own counts, not a library's warning after it."""
    (tmp_path / "s0.err").write_text("rl-lab: no such key\nW1116 12:00:00 compiler: something else\n")
    assert jobs.how_it_failed(jobs.Job("seed 0", ["train"], tmp_path / "s0.log"), status).startswith(sentence)


def test_without_a_trained_seed_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without rows would be no result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl_lab.experiment.reproduce.run_jobs", lambda entries, **settings: ["seed 0 failed: so it is"])
    with pytest.raises(RLLabError, match="so it is"):
        reproduce("random", overrides=OVERRIDES, seeds=[0], results=tmp_path / "results", say=lambda text: None)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("3", [3]), ("0,2-3,2", [0, 2, 3])])
def test_seeds_are_ranges_and_lists(text: str, seeds: list[int]) -> None:
    """As people write them."""
    assert parse_seeds(text) == seeds


def test_a_row_keeps_the_shares_of_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    """Where an environment's last `info` has flags, such as which way an obstacle was passed."""
    monkeypatch.chdir(tmp_path)
    overrides = ["environment.id=rl_lab/Detour-v0", "training.total_timesteps=40", *QUIET]
    path = reproduce("random", overrides=overrides, seeds=[0], episodes=3, results=tmp_path, say=lambda text: None)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["shares"].keys() == {"above", "success"}
    assert row["shares"]["success"] == row["return_mean"]

"""The table of runs: what is read, when it is read again, and what may stand in the files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rl_lab.errors import RunNotFoundError
from rl_lab.orchestration.run_lock import run_lock
from rl_lab.ui.curves import MetricsTail
from rl_lab.ui.run_index import RunIndex, read_row, scan_settings


def test_rows_say_what_the_files_say(make_run, tmp_path: Path) -> None:
    make_run(seed=3)
    row = RunIndex(tmp_path / "runs").changes().rows[0]
    assert row["experiment"] == "demo"
    assert row["seed"] == 3
    assert row["environment"] == "CartPole-v1"
    assert row["workflow"] == "DreamerV3"
    assert row["env_steps"] == 300
    assert row["eval_return"] == 23.0
    assert row["speed"] == 100.0


def test_a_run_with_one_row_has_a_speed_and_a_time_left(make_run, tmp_path: Path) -> None:
    folder = make_run(status="running", rows=0)
    (folder / "metrics.jsonl").write_text('{"env_steps": 200, "wall_s": 4.0, "phase": "train"}\n')
    with run_lock(folder):
        row = RunIndex(tmp_path / "runs").changes().rows[0]
    assert row["speed"] == 50.0
    assert row["left_s"] == 16.0


def test_a_row_says_whether_there_is_a_world_to_dream_in(make_run, random_run: Path, dreamer_run: Path) -> None:
    """The run says it; one of an older version does not, and is tried."""
    rows = [read_row("run", folder) for folder in (random_run, dreamer_run, make_run())]
    assert [row["can_dream"] for row in rows] == [False, True, True]


def test_one_changed_run_costs_no_reading_of_the_others(make_run, tmp_path: Path) -> None:
    folders = [make_run(seed=seed) for seed in range(5)]
    index = RunIndex(tmp_path / "runs")
    first = index.changes()
    assert index.reads == 5
    with open(folders[2] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"env_steps": 900, "wall_s": 9.0, "phase": "train"}) + "\n")
    second = index.changes(first.version)
    assert index.reads == 6
    assert [row["env_steps"] for row in second.rows] == [900]
    assert index.changes(second.version).rows == []


def test_deleted_runs_are_named(make_run, tmp_path: Path) -> None:
    folder = make_run(seed=0)
    make_run(seed=1)
    index = RunIndex(tmp_path / "runs")
    version = index.changes().version
    shutil.rmtree(folder)
    assert index.changes(version).gone == ["demo/20260101-000000-s0"]
    with pytest.raises(RunNotFoundError, match="deleted or renamed"):
        index.folder("demo/20260101-000000-s0")


def test_a_run_whose_process_is_gone_is_lost(make_run, tmp_path: Path) -> None:
    folder = make_run(status="running")
    index = RunIndex(tmp_path / "runs")
    assert index.changes().rows[0]["status"] == "lost"
    with run_lock(folder):
        assert index.changes().rows[0]["status"] == "running"
    assert index.changes().rows[0]["status"] == "lost"


def test_broken_and_hostile_files_are_survived(make_run, tmp_path: Path) -> None:
    folder = make_run()
    (folder / "run.json").write_text('{"status": ["x"], "parameters": 5, "error": {"a": 1}}')
    (folder / "config.yaml").write_bytes(b"\xff\xfe: [")
    (folder / "lock.json").write_text('{"pid": "rm -rf", "host": 5}')
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'[1, 2]\n{"env_steps": "many", "wall_s": null}\n{"env_steps": 4')
    row = RunIndex(tmp_path / "runs").changes().rows[0]
    assert row["env_steps"] is None
    json.dumps(row, allow_nan=False)


def test_links_out_of_the_root_are_no_runs(make_run, tmp_path: Path) -> None:
    make_run()
    outside = tmp_path / "outside" / "secret"
    outside.mkdir(parents=True)
    (outside / "run.json").write_text("{}")
    os.symlink(outside, tmp_path / "runs" / "demo" / "linked")
    os.symlink(tmp_path / "outside", tmp_path / "runs" / "also")
    index = RunIndex(tmp_path / "runs")
    assert [row["id"] for row in index.changes().rows] == ["demo/20260101-000000-s0"]
    for attempt in ("demo/linked", "../outside/secret", "/etc", "demo/../demo/20260101-000000-s0", "%2e%2e"):
        with pytest.raises(RunNotFoundError):
            index.folder(attempt)


def test_scanned_settings_equal_parsed_ones(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("size: null\nexperiment:\n  name: 'a b'\n  seed: 5\nother:\n  deep:\n    seed: 6\n  seed: 7\n")
    assert scan_settings(path) == {"size": None, "experiment.name": "a b", "experiment.seed": 5}


def test_a_tail_reads_on_and_starts_anew_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"env_steps": 1, "a": 1.0, "phase": "p"}\n{"env_steps": 2, "a"')
    tail = MetricsTail(path)
    first = tail.since(0, 0)
    assert first["columns"]["a"] == [1.0]
    with open(path, "a") as file:
        file.write(': NaN, "b": 3}\nnot json\n{"env_steps": 3, "a": 4}\n')
    second = tail.since(first["epoch"], first["count"])
    assert second["start"] == 1
    assert second["columns"]["a"] == [None, 4.0]
    assert second["columns"]["b"] == [3.0, None]
    path.write_text('{"env_steps": 1, "a": 9}\n')
    third = tail.since(second["epoch"], second["count"])
    assert third["start"] == 0
    assert third["columns"]["a"] == [9.0]


def test_long_files_are_thinned_by_means(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"env_steps": n, "a": float(n % 2)}) + "\n" for n in range(12_000)))
    answer = MetricsTail(path).since(0, 0)
    assert answer["count"] == 12_000
    assert len(answer["columns"]["a"]) == 3000
    assert answer["columns"]["a"][:2] == [0.5, 0.5]

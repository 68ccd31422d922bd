"""Run directories: unique, found by any of their names, written by one process at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.torture.locks import contend

from rl_lab.errors import RunNotFoundError
from rl_lab.orchestration import run_directory
from rl_lab.orchestration.run_directory import RunDirectory, find_run, list_runs
from rl_lab.orchestration.run_lock import RunLockedError


def started(root: Path, experiment: str = "dreamer_v3_cartpole", seed: int = 0) -> RunDirectory:
    run = RunDirectory.create(root, experiment, seed)
    run.start(device="cpu", parameters={"encoder": 3, "policy": 4}, argv=["rl-lab", "train"])
    return run


def test_simultaneous_starts_get_different_directories(tmp_path):
    """Sixteen at the same moment."""
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(tmp_path, "x", 3), range(16)))
    assert len({run.path for run in runs}) == 16
    assert all(run.path.name.endswith("-s3") for run in runs)


def test_run_json_says_what_the_run_is(tmp_path):
    """Status, versions, device, start and end, trainable parameters in total and per component."""
    run = started(tmp_path)
    info = run.info()
    assert info["status"] == "running"
    assert info["parameters"] == {"total": 7, "encoder": 3, "policy": 4}
    assert {"python", "torch", "numpy"} <= set(info["versions"])
    assert info["argv"] == ["rl-lab", "train"]
    assert info["end"] is None
    run.finish("completed")
    assert (run.info()["status"], run.info()["start"]) == ("completed", info["start"])
    assert run.info()["end"] is not None


def test_a_resumed_run_keeps_its_start(tmp_path):
    """And remembers when it went on."""
    run = started(tmp_path)
    first = run.info()
    run.finish("interrupted")
    run.start(device="cpu", parameters={})
    again = run.info()
    assert (again["status"], again["start"], again["argv"]) == ("running", first["start"], first["argv"])
    assert len(again["resumed"]) == 1


def test_a_run_is_found_by_path_name_experiment_and_latest(tmp_path):
    """Every way that a person refers to it."""
    first, second = started(tmp_path), started(tmp_path, seed=1)
    other = started(tmp_path, "ppo", seed=2)
    name = second.path.name
    for ref in (second.path, str(second.path), name, f"dreamer_v3_cartpole/{name}", "dreamer_v3_cartpole"):
        assert find_run(ref, tmp_path).path == second.path, ref
    assert find_run(first.path.name, tmp_path).path == first.path
    assert find_run("latest", tmp_path).path == other.path
    assert [run.path for run in list_runs(tmp_path)] == [first.path, second.path, other.path]


def test_a_run_that_does_not_exist_gets_the_nearest_name(tmp_path):
    """Or is told that there are none."""
    with pytest.raises(RunNotFoundError, match="There is no run in"):
        find_run("latest", tmp_path)
    with pytest.raises(RunNotFoundError, match="There are no runs yet"):
        find_run("dreamer", tmp_path)
    started(tmp_path)
    with pytest.raises(RunNotFoundError, match="Did you mean 'dreamer_v3_cartpole'"):
        find_run("dreamer_v3_cartpol", tmp_path)


def test_two_processes_do_not_write_one_run(tmp_path):
    """The lock of a live process holds; that of a dead one does not."""
    run = RunDirectory.create(tmp_path, "x", 0)
    code = f"""
import sys
from rl_lab.orchestration.run_directory import RunDirectory
with RunDirectory({str(run.path)!r}).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(RunLockedError, match=f"is being written by process {other.pid}"), run.lock():
        pass
    other.kill()
    other.wait()
    assert (run.path / "lock.json").exists()
    with run.lock():
        pass
    assert not (run.path / "lock.json").exists()


def test_simultaneous_attempts_at_the_lock_have_one_winner(tmp_path):
    """Eight processes behind a barrier, again and again: a file that is new and still empty is no stale lock."""
    assert contend(tmp_path, processes=8, rounds=40) == [1] * 40


def test_a_torn_lock_does_not_lock_forever(tmp_path):
    """A process killed between making and filling the file leaves an empty one."""
    run = RunDirectory.create(tmp_path, "x", 0)
    for content in ("", "[]", '{"pid": "x", "host": 3}', "\\x00"):
        (run.path / "lock.json").write_text(content)
        with run.lock():
            pass


def test_events_are_cut_back_with_the_run(tmp_path):
    """Events that came after the checkpoint are removed."""
    run = RunDirectory.create(tmp_path, "x", 0)
    run.event("a", "first", 10)
    position = run.events_position()
    run.event("b", "second", 20)
    run.truncate_events(position)
    run.event("c", "third", 15)
    lines = [json.loads(line) for line in run.events_jsonl.read_text().splitlines()]
    assert [(line["kind"], line["env_steps"]) for line in lines] == [("a", 10), ("c", 15)]
    assert {"time", "env_steps", "kind", "message"} == set(lines[0])


def test_a_failing_disk_does_not_hide_the_error(tmp_path, monkeypatch):
    """Marking a run failed on a full disk is best effort; marking it completed is not."""
    run = started(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_lab.orchestration.files.os.replace", full)
    run.finish("failed", "some error")
    with pytest.raises(OSError, match="No space left"):
        run.finish("completed")
    assert not list(run.path.glob(".*.tmp"))


def test_a_commit_is_dirty_where_code_differs_from_it(tmp_path, monkeypatch):
    """New results, and files that are not tracked, leave it clean."""
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/speed.json"):
        (tmp_path / name).write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(run_directory, "__file__", str(tmp_path / "code.py"))
    clean = run_directory.git_commit()
    assert len(clean or "") == 40
    (tmp_path / "results/speed.json").write_text("2\n")
    (tmp_path / "new.py").write_text("1\n")
    assert run_directory.git_commit() == clean
    (tmp_path / "code.py").write_text("2\n")
    assert run_directory.git_commit() == f"{clean}-dirty"

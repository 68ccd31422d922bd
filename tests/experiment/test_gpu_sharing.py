"""Seeds share a GPU by NVIDIA's MPS while a reproduction runs, and without it they take turns and the user is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_lab.experiment.gpu_sharing import CONTROL, LOGS, PIPES, shared_gpu

DAEMON = """#!{python}
import os, sys, time
if "-d" in sys.argv and os.fork() == 0:  # the daemon itself, which keeps what its starter printed to
    time.sleep({seconds})
    os._exit(0)
with open({log!r}, "a") as log:
    print(*sys.argv[1:], sys.stdin.read().strip(), os.environ["{pipes}"], file=log)
sys.exit({status})
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, status: int = 0, seconds: float = 0.0) -> Path:
    """Put a control program on the path that ends with this status; the file in which it notes its calls."""
    log, program = folder / "calls", folder / CONTROL
    program.write_text(DAEMON.format(python=sys.executable, log=str(log), pipes=PIPES, status=status, seconds=seconds))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return log


def seen_by_a_child() -> str:
    command = f"import os; print(os.environ.get({PIPES!r}, 'none'))"
    return subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.strip()


def test_a_daemon_runs_for_as_long_as_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started once, found by child processes in its own folder, ended also where the block fails."""
    monkeypatch.delenv(PIPES, raising=False)
    log = install(tmp_path, monkeypatch)
    said: list[str] = []
    with pytest.raises(KeyError) as failure, shared_gpu(say=said.append):
        raise KeyError(seen_by_a_child())
    child = failure.value.args[0]
    assert log.read_text().splitlines() == [f"-d  {child}", f"quit {child}"]
    assert not Path(child).exists()  # a temporary folder, now gone
    assert PIPES not in os.environ
    assert LOGS not in os.environ
    assert not said


def test_a_daemon_that_keeps_its_output_open_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PIPES, raising=False)
    install(tmp_path, monkeypatch, seconds=20.0)
    begin = time.monotonic()
    with shared_gpu(say=pytest.fail):
        assert time.monotonic() - begin < 10.0


def test_without_a_daemon_the_seeds_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that does not start leaves no trace for the children, and one line says so."""
    monkeypatch.delenv(PIPES, raising=False)
    log = install(tmp_path, monkeypatch, status=1)
    said: list[str] = []
    with shared_gpu(say=said.append):
        assert seen_by_a_child() == "none"
    assert len(log.read_text().splitlines()) == 1
    assert said == ["The seeds take turns on the GPU, because NVIDIA's MPS did not start: exit status 1"]


def test_a_daemon_of_the_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(tmp_path, monkeypatch)
    monkeypatch.setenv(PIPES, "/of/the/user")
    with shared_gpu(say=print):
        assert seen_by_a_child() == "/of/the/user"
    assert os.environ[PIPES] == "/of/the/user"
    assert not log.exists()

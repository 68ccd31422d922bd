"""The processes of open dreams."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rl_lab.ui.dream import hub


def stubborn(connection: Connection, folder: str, trust: bool) -> None:
    """A worker that hears no signal to end, as one in which SDL draws."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send(({"type": "ready"}, []))
    time.sleep(60)


def test_a_dream_that_is_closed_ends_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server waits for its processes when it is stopped: Ctrl-C would hang."""
    monkeypatch.setattr(hub, "run_worker", stubborn)
    dream = hub.Dream(tmp_path)
    assert dream.connection.poll(60)
    dream.close()
    dream.process.join(10)
    assert dream.process.exitcode == -signal.SIGKILL

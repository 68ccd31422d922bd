"""The process that writes a run."""

from __future__ import annotations

import socket
from functools import lru_cache
from pathlib import Path

import psutil

from rl_lab.orchestration.files import read_json
from rl_lab.orchestration.run_lock import LOCK_FILE


@lru_cache(maxsize=64)
def _process(pid: int) -> psutil.Process:
    """Kept, for the share of the processor is measured between two calls on the same object."""
    return psutil.Process(pid)


def writer_of(folder: Path) -> psutil.Process | None:
    """The process of this machine that writes the run: the lock names it, and it has a file of this very folder open.

    A process id in a file proves nothing, and a stop signal must not reach a stranger.
    """
    pid = (read_json(folder / LOCK_FILE) or {}).get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or not 1 < pid < 1 << 31:
        return None
    try:
        process = _process(pid)
        if not process.is_running():  # its id may be another's by now
            _process.cache_clear()
            process = _process(pid)
        inside = folder.resolve()
        if any(Path(file.path).is_relative_to(inside) for file in process.open_files()):
            return process
    except (psutil.Error, OSError):
        return None
    return None


def is_being_written(folder: Path) -> bool:
    """Whether a process of this machine writes the run, or one of another machine says so."""
    if not (folder / LOCK_FILE).exists():
        return False
    host = (read_json(folder / LOCK_FILE) or {}).get("host")
    return writer_of(folder) is not None or (isinstance(host, str) and host != socket.gethostname())

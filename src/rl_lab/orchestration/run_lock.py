"""One writer a run: the operating system's lock on `lock.json`, which ends with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_lab.errors import RLLabError
from rl_lab.orchestration.files import read_json

LOCK_FILE = "lock.json"


class RunLockedError(RLLabError):
    """Another live process writes this run."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory. What stands in the file only tells people who holds it."""
    path = folder / LOCK_FILE
    descriptor = _acquire(path)
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # still locked: whoever has opened it meanwhile finds that it is gone
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """A descriptor of the file that stands at `path`, locked for this process alone."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise _locked(path) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise RLLabError(
                f"{path.parent} lies on a file system without locks ({error.strerror}), so that two processes could"
                " write one run. Set run_root to a folder on another one."
            ) from error
        os.close(descriptor)  # the holder before removed it in between: begin again


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _locked(path: Path) -> RunLockedError:
    holder = read_json(path) or {}
    pid, host = holder.get("pid"), holder.get("host")
    who = f"process {pid} on {host}" if isinstance(pid, int) and isinstance(host, str) else "another process"
    return RunLockedError(f"{path.parent} is being written by {who}. Wait for it or stop it.")

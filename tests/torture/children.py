"""Work in forked processes that may be killed at any moment: they start with everything imported, in milliseconds."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_lab.errors import RLLabError

Status = Literal["done", "refused", "traceback", "killed", "hung"]


@dataclass(frozen=True)
class Ended:
    """How a child ended: with a value, with one of RL Lab's own errors, with any other, by a signal, or not at all."""

    status: Status
    value: Any = None
    text: str = ""
    seconds: float = 0.0


def in_child(
    work: Callable[[], Any], *, limit: float = 120.0, number: int | None = None, after: float | None = None
) -> Ended:
    """Do `work` in a fork. With `number`, send that signal `after` seconds; a child that lasts longer than `limit` is
    killed and counts as hung."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work_and_leave(work, writing)
    os.close(writing)
    start = time.monotonic()
    try:
        if number is not None and after is not None and not _readable(reading, after):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        hung = not _readable(reading, limit)
        if hung:
            os.kill(pid, signal.SIGKILL)
        message = b"" if hung else _read_all(reading)
    finally:
        os.close(reading)
    _, code = os.waitpid(pid, 0)
    seconds = time.monotonic() - start
    if hung:
        return Ended("hung", text=f"no end after {limit:g} s", seconds=seconds)
    if not message:
        return Ended("killed", value=code, text=f"ended without a word, wait status {code}", seconds=seconds)
    status, value, text = pickle.loads(message)
    return Ended(status, value, text, seconds)


def _work_and_leave(work: Callable[[], Any], writing: int) -> None:
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    try:
        answer: tuple[Status, Any, str] = ("done", work(), "")
    except RLLabError as error:
        answer = ("refused", None, str(error))
    except BaseException as error:
        answer = ("traceback", None, f"{type(error).__name__}: {error}")
    try:
        content = pickle.dumps(answer)
    except Exception as error:
        content = pickle.dumps(("traceback", None, f"{type(error).__name__}: {error}"))
    with contextlib.suppress(OSError):
        os.write(writing, content)
    os._exit(0)


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)

"""Reading the small files of a folder that may come from anybody: pipes, devices, links and nonsense included."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def open_file(path: Path | str) -> BinaryIO:
    """A file opened for reading; an OSError for everything else: a pipe would be waited for, a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return open(descriptor, "rb")


def read_bytes(path: Path | str) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_text(path: Path | str) -> str:
    """The text of a file; what is not UTF-8 in it is replaced."""
    return read_bytes(path).decode("utf-8", errors="replace")


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

"""Small files that are there whole or not at all. Torch-free."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_lab.reading import parse_object, read_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a used-up quota, a limit on the size of files


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step: readers and a crash see the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def overwrite(path: Path, text: str) -> None:
    """Replace a file's content within the blocks that it has: for a disk that is full. A crash may tear it."""
    content = text.encode()
    with open(path, "r+b") as file:
        if len(content) > os.fstat(file.fileno()).st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where the file is missing or not whole."""
    try:
        return parse_object(read_bytes(path))
    except OSError:
        return None


def to_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, default=str) + "\n"

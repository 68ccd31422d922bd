"""Reading the small files of a folder that may come from anybody: pipes, devices, links and nonsense included."""

from __future__ import annotations

import errno
import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

LARGEST_YAML = 1_000_000  # bytes
DEEPEST_YAML = 60  # collections in each other


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


def parse_yaml(content: str | bytes) -> Any:
    """Plain values; a ValueError for what is no YAML, and for what no run writes (`yaml_oddity`)."""
    import yaml

    odd = yaml_oddity(content)
    if odd is not None:
        raise ValueError(f"it has {odd}, which no run writes")
    try:
        return yaml.load(content, Loader=_loader())
    except (yaml.YAMLError, TypeError, RecursionError) as error:  # keys that cannot be keys
        raise ValueError(" ".join(str(error).split())) from error


def yaml_oddity(content: str | bytes) -> str | None:
    """A feature of this YAML text that no run writes and that could take for ever to read, or mislead; None where there
    is none."""
    import yaml

    if len(content) > LARGEST_YAML:
        return f"{len(content):,} bytes"
    depth = 0
    try:
        for event in yaml.parse(content, Loader=_loader()):
            if isinstance(event, yaml.AliasEvent):
                return "aliases (*name)"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST_YAML:
                return f"more than {DEEPEST_YAML} lists or mappings in each other"
    except (yaml.YAMLError, ValueError):
        return None  # reading it will say what is wrong
    return None


@cache
def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)

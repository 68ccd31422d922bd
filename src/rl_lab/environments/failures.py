"""Errors of environments and values that they returned, described in one line."""

from __future__ import annotations

import re
import traceback
from typing import Any

import numpy as np

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


def described(error: BaseException) -> str:
    """Kind and message of an exception; where it has no message, the place that raised it."""
    kind, message = type(error).__name__, " ".join(str(error).split())
    if message:
        return f"{kind}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{kind} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else kind


def describe_value(value: Any) -> str:
    """Type, dtype and shape of a value, for error messages; never its content."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return "nothing" if value is None else f"{type(value).__name__}"


def last_words(text: str) -> str:
    """The last line of a traceback, with the innermost place where that line is a bare name or says where it hung."""
    lines = text.strip().splitlines()
    if not lines:
        return "no error text"
    places = _PLACE.findall(text)
    if not places or ": " in lines[-1]:
        return lines[-1]
    most_recent_first = "most recent call first" in text
    file, line = places[0] if most_recent_first else places[-1]
    return f"{lines[-1]} ({file}, line {line})"

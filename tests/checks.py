"""The checker of annotations at run time: see `conftest`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype

_kept: dict[Any, Callable[..., Any]] = {}


def check_annotations(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, once for all copies of a function inside a function, of which every call of the outer one makes
    another. jaxtyping gives an empty one here that has the names and annotations of the real one, and nothing else."""
    if "<locals>" not in function.__qualname__:
        return beartype(function)
    names, types = function.__code__.co_varnames, tuple(function.__annotations__.values())
    key = (function.__module__, function.__qualname__, names, types)
    if key not in _kept:
        _kept[key] = beartype(function)
    return _kept[key]

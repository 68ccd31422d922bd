"""Arithmetic in YAML: `${add:${deter},${mul:${groups},${classes}}}`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "sub": lambda left, right: left - right,
    "mul": lambda *values: math.prod(values),
    "div": lambda left, right: left / right,
    "floordiv": lambda left, right: left // right,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "int": lambda value: int(value),
    "len": lambda value: len(value),
    "if": lambda condition, yes, no: yes if condition else no,
    "eq": lambda left, right: left == right,
}


def register() -> None:
    """Make the resolvers known to OmegaConf; calling it again changes nothing."""
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)

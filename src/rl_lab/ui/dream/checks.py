"""Values that a page sends, checked."""

from __future__ import annotations

import math
from typing import Any

from rl_lab.errors import ConfigError


def one_of(value: Any, allowed: tuple[str, ...], what: str) -> str:
    if value not in allowed:
        raise ConfigError(f"{what}: expected one of {', '.join(allowed)}.")
    return str(value)


def whole(value: Any, fallback: int, least: int, most: int) -> int:
    return min(max(int(value), least), most) if isinstance(value, int | float) and math.isfinite(value) else fallback


def number(value: Any, fallback: float, least: float, most: float) -> float:
    return min(max(float(value), least), most) if isinstance(value, int | float) and math.isfinite(value) else fallback

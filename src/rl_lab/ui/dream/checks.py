"""Values that a page sends, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_lab.errors import ConfigError
from rl_lab.specs import ActionSpec


def one_of(value: Any, allowed: Sequence[str], what: str) -> str:
    if value not in allowed:
        raise ConfigError(f"{what}: expected one of {', '.join(allowed)}.")
    return str(value)


def whole(value: Any, fallback: int, least: int, most: int) -> int:
    return min(max(int(value), least), most) if isinstance(value, int | float) and math.isfinite(value) else fallback


def number(value: Any, fallback: float, least: float, most: float) -> float:
    return min(max(float(value), least), most) if isinstance(value, int | float) and math.isfinite(value) else fallback


def action_of(value: Any, spec: ActionSpec) -> np.ndarray | None:
    """An action as the environment stores it, in the shape and dtype of `spec`; None stays None."""
    if value is None:
        return None
    size = int(np.prod(spec.shape))
    if not isinstance(value, list) or len(value) != size or not all(isinstance(v, int | float) for v in value):
        raise ConfigError(f"The action must be {size} number(s).")
    array = np.asarray(value, np.float64)
    if not np.isfinite(array).all():
        raise ConfigError("The action must be finite.")
    if spec.kind == "continuous":
        return array.clip(-1.0, 1.0).astype(np.float32).reshape(spec.shape)
    return array.clip(0, np.asarray(spec.classes) - 1).astype(np.int32)

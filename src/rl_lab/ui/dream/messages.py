"""Moments as messages to a page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rl_lab.ui.dream.tape import Moment
from rl_lab.ui.dream.worker import Message
from rl_lab.ui.dream.worlds import Seen

TRACED = 12  # entries of a vector that are sent with each moment


def shown(moment: Moment, kind: str) -> Message:
    """A moment with its pictures."""
    header = {"type": kind, **header_of(moment)}
    header["pictures"] = {name: description for name, (description, _) in moment.pictures.items()}
    return header, [data for _, data in moment.pictures.values()]


def header_of(moment: Moment) -> dict[str, Any]:
    """Everything of a moment but its pictures, as JSON."""
    real = moment.real
    return {
        "id": moment.number,
        "parent": None if moment.parent is None else moment.parent.number,
        "time": moment.time,
        "since": moment.since,
        "driver": moment.driver,
        "action": None if moment.action is None else np.asarray(moment.action).reshape(-1).tolist(),
        "real": None if real is None else seen_fields(real),
        "dream_reward": moment.dream_reward,
        "continuation": moment.continuation,
        "value": _finite(moment.value),
        "surprise": _finite(moment.surprise),
        "error": _finite(moment.error),
        "baseline": _finite(moment.baseline),
        "seen": None if real is None else _trace(real.observation),
        "dreamed": _trace(moment.dreamed),
    }


def seen_fields(seen: Seen) -> dict[str, Any]:
    """Flags of a real moment, as JSON."""
    return {"reward": seen.reward, "ended": seen.has_ended, "terminal": seen.is_terminal}


def _trace(observation: dict[str, np.ndarray]) -> list[float]:
    values = [value.reshape(-1) for value in observation.values() if value.ndim < 3]
    flat = np.concatenate(values)[:TRACED] if values else np.zeros(0)
    return [float(f"{value:.5g}") for value in np.nan_to_num(flat)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

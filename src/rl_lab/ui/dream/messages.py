"""Moments as messages to a page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_lab.ui.dream.tape import Moment
from rl_lab.ui.dream.worker import Message
from rl_lab.ui.dream.worlds import Seen

if TYPE_CHECKING:
    from rl_lab.ui.dream.player import Player

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
        "dream_reward": _finite(moment.dream_reward),
        "continuation": _finite(moment.continuation),
        "value": _finite(moment.value),
        "surprise": _finite(moment.surprise),
        "error": _finite(moment.error),
        "baseline": _finite(moment.baseline),
        "seen": None if real is None else _trace(real.observation),
        "dreamed": _trace(moment.dreamed),
    }


def seen_fields(seen: Seen) -> dict[str, Any]:
    """Flags of a real moment, as JSON."""
    return {"reward": _finite(seen.reward), "ended": seen.has_ended, "terminal": seen.is_terminal}


def _trace(observation: dict[str, np.ndarray]) -> list[float]:
    values = [value.reshape(-1) for value in observation.values() if value.ndim < 3]
    flat = np.concatenate(values)[:TRACED] if values else np.zeros(0)
    return [float(f"{value:.5g}") for value in np.nan_to_num(flat)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def state_of(player: Player) -> dict[str, Any]:
    """The message with the state of the page's controls: who plays in which world, how fast, with which planner."""
    options, simulator = player.session.options, player.model.simulator
    return {
        "type": "state",
        "playing": player.playing,
        "current": player.session.current.number,
        "fps": player.fps,
        "idle": player.idle,
        "world": options.world,
        "driver": options.driver,
        "planner": options.planner,
        "horizon": options.horizon,
        "plan": options.shows_plan,
        "temperature": simulator.temperature,
        "member": simulator.member,
        "seed": player.session.seed,
        "episode": player.session.episode,
        "context": player.session.context,
        "from_record": player.session.record is not None,
        "checkpoint": player.model.checkpoint,
        "checkpoints": sorted({*player.known_checkpoints, *player.models}, key=_checkpoint_order),
        "follows": player.follows,
    }


def _checkpoint_order(name: str) -> tuple[bool, int]:
    digits = name.removeprefix("step-")
    return (not digits.isdigit(), int(digits) if digits.isdigit() else 0)

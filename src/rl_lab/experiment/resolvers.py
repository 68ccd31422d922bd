"""Arithmetic in YAML, `${add:${deter},${mul:${groups},${classes}}}`, and sizes, `${preset:units,256}`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf


def _preset(name: str, default: Any, *, _root_: DictConfig) -> Any:
    """A value of the preset that `size` picks; the default where the experiment has no presets.

    A part asks for its own sizes, so that another part can take its place without them.
    """
    presets = _root_.get("presets")
    return presets[_root_.size].get(name, default) if presets else default


def _replay_capacity(most: int, *, _root_: DictConfig) -> int:
    """The number of records that a run can make, at most `most`: one for every env step, and one more for every
    episode."""
    return max(10_000, min(most, 2 * _root_.training.total_timesteps))


def _update_ratio(*, _root_: DictConfig) -> float:
    """Updates per env step at the workflow's `train_ratio`, the number of replayed records per env step."""
    workflow = _root_.workflow
    return workflow.train_ratio / (workflow.batch_size * workflow.sequence_length)


RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "sub": lambda left, right: left - right,
    "mul": lambda *values: math.prod(values),
    "div": lambda left, right: left / right,
    "floordiv": lambda left, right: left // right,
    "ceildiv": lambda left, right: -(-left // right),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "int": lambda value: int(value),
    "len": lambda value: len(value),
    "if": lambda condition, yes, no: yes if condition else no,
    "eq": lambda left, right: left == right,
    "preset": _preset,
    "replay_capacity": _replay_capacity,
    "update_ratio": _update_ratio,
}


def register() -> None:
    """Make the resolvers known to OmegaConf; calling it again changes nothing."""
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)

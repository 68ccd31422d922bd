"""The way of new priorities from an update back to the replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_lab.data_sources.base import DataSource


class Priorities(NamedTuple):
    """New priorities of some records."""

    source: str
    indices: Tensor
    values: Tensor
    arrived: torch.cuda.Event | None = None  # when they are in host memory, where they come from a GPU


class PriorityWriter:
    """Writes priorities at once; with `late` when the next ones are handed over.

    That is for a GPU: the host then draws the next batch and begins the next update without waiting for the one that
    is under way.
    """

    def __init__(self, sources: Mapping[str, DataSource], *, late: bool) -> None:
        self._sources, self.late = sources, late
        self._kept: Priorities | None = None

    def write(self, source: str, indices: Tensor, values: Tensor) -> None:
        new = Priorities(source, indices, values)
        if self.late:
            due, self._kept = self._kept, _begin_copy(new)
        else:
            due = new
        if due is not None:
            self._sources[due.source].update(due.indices, {"priority": _arrived(due)})

    def state_dict(self) -> dict[str, Any]:
        if (kept := self._kept) is None:
            return {}
        return {"source": kept.source, "indices": kept.indices, "values": _arrived(kept).clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = Priorities(**state) if state else None


def _begin_copy(new: Priorities) -> Priorities:
    """On its way to the host; nobody waits for it yet."""
    if not new.values.is_cuda:
        return new
    values, arrived = new.values.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record()
    return new._replace(values=values, arrived=arrived)


def _arrived(priorities: Priorities) -> Tensor:
    if priorities.arrived is not None:
        priorities.arrived.synchronize()
    return priorities.values

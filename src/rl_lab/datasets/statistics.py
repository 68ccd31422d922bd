"""Mean, deviation and limits of each field of a dataset, found in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_lab.records import Fields


@dataclass(frozen=True)
class FieldStatistics:
    """Over all records, entry by entry; each [*shape] float64."""

    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: int

    def state_dict(self) -> dict[str, Any]:
        values = {name: torch.from_numpy(getattr(self, name).copy()) for name in ("mean", "std", "low", "high")}
        return {**values, "count": self.count}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> FieldStatistics:
        values = {name: state[name].numpy() for name in ("mean", "std", "low", "high")}
        return cls(**values, count=state["count"])


class StatisticsCollector:
    """Takes in records episode by episode (Chan's parallel variance: exact however long the data are).

    Images are left out. Of the actions, those of last records do not count: none was taken there.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, records: Fields) -> None:
        for name, value in records.items():
            if value.dtype == bool or value.dtype == np.uint8:
                continue
            taken = value[~records["is_last"]] if name == "action" else value
            if len(taken):
                self._add(name, taken.astype(np.float64))

    def _add(self, name: str, value: np.ndarray) -> None:
        count, mean = len(value), value.mean(0)
        squares, low, high = np.square(value - mean).sum(0), value.min(0), value.max(0)
        if name in self._sums:
            before, old_mean, old_squares, old_low, old_high = self._sums[name]
            total, shift = before + count, mean - old_mean
            squares = old_squares + squares + np.square(shift) * before * count / total
            mean, count = old_mean + shift * count / total, total
            low, high = np.minimum(old_low, low), np.maximum(old_high, high)
        self._sums[name] = (count, mean, squares, low, high)

    def result(self) -> dict[str, FieldStatistics]:
        results = {}
        for name, (count, mean, squares, low, high) in self._sums.items():
            mean, std, low, high = map(np.asarray, (mean, np.sqrt(squares / count), low, high))
            results[name] = FieldStatistics(mean, std, low, high, count)
        return results

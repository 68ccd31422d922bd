"""Batches for updates that follow each other without new records in between, drawn at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.streams import StreamIndex
from rl_lab.records import BatchSpec

MOST = 16  # batches
MOST_BYTES = 1 << 16  # of one batch: beyond that copying is the cost, and not the calls

Values = dict[str, np.ndarray]  # field → [batch, time, ...]


class DrawnAhead:
    """Uniform batches from host memory. Sixteen small ones cost little more than one.

    Nothing is drawn ahead over an addition, which throws away what is left: so each batch is uniform over all records
    that are there when it is taken. How many updates will follow each other is guessed: as many as the last time.
    `gather` copies fields of rows.
    """

    def __init__(self, index: StreamIndex, gather: Callable[[np.ndarray, Sequence[str]], Values]) -> None:
        self._index, self._gather = index, gather
        self._spec: BatchSpec | None = None
        self._names: list[str] = []
        self._left: deque[tuple[np.ndarray, Values]] = deque()  # record ids [batch, time], and their fields
        self._taken = 0  # since the last change of the records
        self._expected = 1

    def records_changed(self) -> None:
        """Some were added, or written anew."""
        if self._taken:
            self._expected = self._taken
            self.clear()

    def clear(self) -> None:
        """Give up what was drawn and not taken."""
        self._taken = 0
        self._left.clear()

    def take(self, spec: BatchSpec, names: list[str], rng: np.random.Generator) -> tuple[np.ndarray, Values]:
        """Record ids and fields of one batch. The windows that the index knows of must hold one."""
        if not self._left or spec != self._spec:
            self._draw(spec, names, rng)
        self._taken += 1
        return self._left.popleft()

    def _draw(self, spec: BatchSpec, names: list[str], rng: np.random.Generator) -> None:
        self._spec, self._names = spec, names
        self._left.clear()
        count = max(1, min(self._expected - self._taken, MOST))
        windows = self._index.draw(rng, count=count * spec.batch_size, window=spec.window, online=False)
        self._put_by(windows.ids, windows.rows)

    def _put_by(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """The batches that these windows make, one after the other."""
        assert self._spec is not None
        size, fields = self._spec.batch_size, self._gather(rows, self._names)
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            self._left.append((ids[part], {name: value[part] for name, value in fields.items()}))

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Only the positions of the batches' records: none of these records has changed since."""
        ids = torch.from_numpy(np.concatenate([ids for ids, _ in self._left])) if self._left else None
        spec = None if self._spec is None else list(self._spec)
        return {"taken": self._taken, "expected": self._expected, "spec": spec, "names": self._names, "ids": ids}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the records were restored."""
        self._taken, self._expected, self._names = state["taken"], state["expected"], state["names"]
        self._spec = None if state["spec"] is None else BatchSpec.from_list(state["spec"])
        self._left.clear()
        if state["ids"] is not None:
            ids = state["ids"].numpy()
            self._put_by(ids, self._index.locate(ids.ravel())[1].reshape(ids.shape))

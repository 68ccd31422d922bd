"""Prioritised sampling (Schaul et al., 2016): which windows are drawn, how often, and how much each then counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_lab import ranks
from rl_lab.buffers.streams import StreamIndex, Windows
from rl_lab.buffers.sum_tree import SumTree
from rl_lab.errors import ConfigError, DataError


class PrioritySampler:
    """A window is drawn with the probability p^α / Σ p^α, where p is the priority of the record that it is trained on:
    its first one after the context.

    Priorities belong to records, and new records get the highest one that the replay holds then (1 at first); a
    priority of 0 is never drawn. The tree holds only those records whose window is complete: enough records before them
    (of the same stream, not yet overwritten) and after them. It follows the stream index when something is drawn.
    """

    def __init__(self, index: StreamIndex, *, alpha: float) -> None:
        if alpha < 0.0:
            raise ConfigError(f"alpha={alpha}: expected 0 (uniform) or more.")
        self._index, self._alpha = index, alpha
        rows = index.num_envs * index.length
        self._masses = np.zeros(rows)  # p^α of every row, whether it can be drawn or not
        self._tree = SumTree(rows)
        self._known = index.written.copy()  # records whose masses are set
        self._followed = index.written.copy()  # records that the tree has heard of
        self._shape = (0, 0)  # context and length of the windows that the tree is for
        self._first = np.zeros(index.num_envs, np.int64)  # the drawable records of each stream: first, and …
        self._stop = np.zeros(index.num_envs, np.int64)  # … one past the last

    def draw(
        self, rng: np.random.Generator, *, count: int, context: int, length: int, beta: float
    ) -> tuple[Windows, np.ndarray]:
        """Windows, one from each of `count` equal shares of the mass, and their weights (N·P)^-β, the largest 1."""
        self._follow(context, length)
        total = self._tree.total
        if not total > 0.0:
            raise DataError(
                "Prioritised replay: no window can be drawn, for all priorities are 0. Give a record that is to be "
                "drawn again a priority above 0 (|error| + 1e-6, say)."
            )
        rows = self._tree.find((np.arange(count) + rng.random(count)) * (total / count))
        mass = self._tree.leaves[rows]
        # N and the total cancel out, unless other ranks draw from trees with totals of their own.
        weights = (mass if ranks.count() == 1 else mass / total) ** -beta
        env, slot = np.divmod(rows, self._index.length)
        # The one record number that lies in this slot now.
        newest = self._index.written[env] - 1
        trained = newest - (newest - slot) % self._index.length
        sequence = (trained - context)[:, None] + np.arange(context + length)
        env = env[:, None]
        windows = Windows(
            sequence * self._index.num_envs + env, env * self._index.length + sequence % self._index.length
        )
        return windows, (weights / ranks.highest(weights.max())).astype(np.float32)

    def update(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities; records that were overwritten in the meantime are left alone."""
        ids, values = np.asarray(ids, np.int64).reshape(-1), np.asarray(priorities, np.float64).reshape(-1)
        if not (np.isfinite(values) & (values >= 0.0)).all():
            raise DataError("Prioritised replay: a priority is negative, NaN or infinite. Hand over |error| + 1e-6.")
        self._note_new()
        alive, rows = self._index.locate(ids)
        sequence = ids // self._index.num_envs
        if len(rows) < len(ids):
            values, sequence = values[alive], sequence[alive]
        if not len(rows):
            return
        masses = values**self._alpha if self._alpha else (values > 0.0).astype(np.float64)
        self._masses[rows] = masses
        env = rows // self._index.length
        drawable = (sequence >= self._first[env]) & (sequence < self._stop[env])
        self._tree.set(rows[drawable], masses[drawable])

    # Following the ring -----------------------------------------------------------------------------------------------

    def _note_new(self) -> None:
        """Records that arrived since the last look get the highest mass of those before them."""
        written = self._index.written
        if not np.array_equal(written, self._known):
            highest = float(self._masses.max()) if self._known.any() else 1.0
            rows = self._rows(np.maximum(self._known, written - self._index.length), written)
            self._masses[rows] = highest if highest > 0.0 else 1.0
            self._known = written.copy()

    def _follow(self, context: int, length: int) -> None:
        """Take into the tree the windows that are complete by now, and out of it those that lost a record."""
        self._note_new()
        written, changed = self._index.written, self._shape != (context, length)
        if not changed and np.array_equal(written, self._followed):
            return
        self._followed = written.copy()
        first = np.maximum(written - self._index.length, 0) + context
        stop = np.maximum(written - (length - 1), first)
        if changed:
            self._shape = (context, length)
            masses = np.zeros_like(self._masses)
            rows = self._rows(first, stop)
            masses[rows] = self._masses[rows]
            self._tree.fill(masses)
        else:
            # A row that was given up may be taken again in the same stroke, by a later record: in this order.
            gone = self._rows(self._first, np.minimum(first, self._stop))
            if len(gone):
                self._tree.set(gone, 0.0)
            fresh = self._rows(np.maximum(self._stop, first), stop)
            if len(fresh):
                self._tree.set(fresh, self._masses[fresh])
        self._first, self._stop = first, stop

    def _rows(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Rows of the records first … stop - 1 of every stream; at most one round of the ring."""
        counts = np.maximum(stop - first, 0)
        env = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(env)) - np.repeat(np.cumsum(counts) - counts, counts)
        return env * self._index.length + (first[env] + number) % self._index.length

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Saving changes nothing: when a record gets its mass must not depend on when a checkpoint was made."""
        masses, known = torch.from_numpy(self._masses.copy()), torch.from_numpy(self._known.copy())
        return {"masses": masses, "known": known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the stream index was restored. The tree is filled when something is drawn."""
        self._masses[:] = state["masses"].numpy()
        self._known = state["known"].numpy().copy()
        self._shape = (0, 0)
        self._first[:] = 0
        self._stop[:] = 0

    def memory(self) -> int:
        """Bytes of the masses and of the tree."""
        return self._masses.nbytes + self._tree.nbytes

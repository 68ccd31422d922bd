"""Which records are held, which windows they form, and which of those are drawn: index arithmetic only, no data.

Every environment writes one continuous stream. Record number `seq` of environment `env` has the id
`seq * num_envs + env` for ever, and lies in row `env * length + seq % length` until the ring comes round. So an id
tells by itself whether its record is still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Windows:
    """Windows of consecutive records of one stream each."""

    ids: np.ndarray  # [batch, time] int64
    rows: np.ndarray  # [batch, time] int64


class StreamIndex:
    """Write positions of all streams, uniform draws of windows, and the online queue."""

    def __init__(self, *, num_envs: int, length: int) -> None:
        self.num_envs, self.length = num_envs, length
        self.written = np.zeros(num_envs, np.int64)  # records ever written, by stream
        self._next_online = np.zeros(num_envs, np.int64)  # start of the next window that was never queued
        self._envs = np.arange(num_envs)

    # Records ----------------------------------------------------------------------------------------------------------

    def append(self, indices: list[np.ndarray | None]) -> np.ndarray:
        """Rows of new records, one for each environment of each block in turn; None stands for all environments."""
        chunks, written, full = [], self.written, 0
        for envs in indices:
            if envs is None:
                full += 1
                continue
            if full:
                chunks.append(self._append_full(full))
                full = 0
            chunks.append(envs * self.length + written[envs] % self.length)
            written[envs] += 1
        if full:
            chunks.append(self._append_full(full))
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def _append_full(self, count: int) -> np.ndarray:
        sequence = self.written + np.arange(count)[:, None]
        self.written += count
        return (self._envs * self.length + sequence % self.length).ravel()

    def previous_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows before these in their streams."""
        slots = rows % self.length
        return rows - slots + (slots - 1) % self.length

    def held(self) -> np.ndarray:
        """Records held by each stream; they fill the first rows of the stream's part."""
        return np.minimum(self.written, self.length)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(which of the flat ids are still held, the rows of those)."""
        sequence, env = np.divmod(ids, self.num_envs)
        written = self.written[env]
        alive = (sequence < written) & (sequence >= written - self.length) & (ids >= 0)
        return alive, (env * self.length + sequence % self.length)[alive]

    def stretch(self, start: int, count: int) -> np.ndarray:
        """Ids of records number `start` to `start + count` of all that are held, stream by stream, oldest first."""
        held = self.held()
        ends = np.cumsum(held)
        number = np.arange(start, min(start + count, int(ends[-1])))
        env = np.searchsorted(ends, number, side="right")
        sequence = self.written[env] - (ends[env] - number)
        return sequence * self.num_envs + env

    # Windows ----------------------------------------------------------------------------------------------------------

    def window_counts(self, window: int) -> np.ndarray:
        """Windows that each stream holds. None of them crosses the write position: they are consecutive records."""
        return np.maximum(np.minimum(self.written, self.length) - (window - 1), 0)

    def draw(self, rng: np.random.Generator, *, count: int, window: int, online: bool) -> Windows:
        """`count` windows: those of the online queue first, the others uniform over all windows of all streams."""
        if online:
            env, start = self._take_online(count, window)
            if len(env) < count:
                other, other_start = self._draw_uniformly(rng, count - len(env), window)
                env, start = np.concatenate([env, other]), np.concatenate([start, other_start])
        else:
            env, start = self._draw_uniformly(rng, count, window)
        sequence = start[:, None] + np.arange(window)
        if self.num_envs == 1:
            return Windows(sequence, sequence % self.length)
        env = env[:, None]
        return Windows(sequence * self.num_envs + env, env * self.length + sequence % self.length)

    def _draw_uniformly(self, rng: np.random.Generator, count: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Streams and first records of windows. Of a single stream its number goes without saying."""
        if self.num_envs == 1:
            written = int(self.written[0])
            held = min(written, self.length) - (window - 1)
            return self._envs[:0], written - window - (held - 1) + rng.integers(0, held, size=count)
        ends = np.cumsum(self.window_counts(window))
        pick = rng.integers(0, ends[-1], size=count)
        env = np.searchsorted(ends, pick, side="right")
        # Counted back from a stream's newest window, so that its oldest need not be known.
        return env, self.written[env] - window - (ends[env] - 1 - pick)

    def _take_online(self, count: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `count` complete windows that follow each other without overlap, the earliest first; each only once."""
        unserved = self.written - self._next_online
        if unserved.max() < window:
            return self._envs[:0], self._envs[:0]
        behind = np.maximum(unserved - self.length, 0)  # overwritten before they could be served
        self._next_online += -(-behind // window) * window
        pending = np.minimum((self.written - self._next_online) // window, count)
        most = int(pending.max())
        starts = self._next_online + np.arange(most)[:, None] * window  # [most, env]
        flat = np.flatnonzero((np.arange(most)[:, None] < pending).ravel())
        chosen = flat[np.argsort(starts.ravel()[flat], kind="stable")[:count]]
        env = chosen % self.num_envs
        self._next_online += window * np.bincount(env, minlength=self.num_envs)
        return env, starts.ravel()[chosen]

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"written": torch.tensor(self.written), "next_online": torch.tensor(self._next_online)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.written[:] = state["written"].numpy()
        self._next_online[:] = state["next_online"].numpy()

"""Windows of records that stay within one episode: index arithmetic only, no data."""

from __future__ import annotations

import numpy as np


class EpisodeWindows:
    """The windows of `window` consecutive records in episodes that lie end to end.

    With `pad_before` and `pad_after` a window may begin or end up to this many records outside its episode; there the
    first or the last record is repeated.
    """

    def __init__(
        self, starts: np.ndarray, lengths: np.ndarray, *, window: int, pad_before: int = 0, pad_after: int = 0
    ) -> None:
        self._starts, self._lengths, self._pad_before = starts, lengths, pad_before
        counts = np.where(lengths > 0, lengths + pad_before + pad_after - (window - 1), 0)
        self._ends = np.cumsum(np.maximum(counts, 0))
        self._steps = np.arange(window)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """[windows, time] records of the windows with these numbers, from 0 to `len` - 1."""
        episode = np.searchsorted(self._ends, numbers, side="right")
        before = np.where(episode > 0, self._ends[episode - 1], 0)
        offset = (numbers - before - self._pad_before)[:, None] + self._steps
        inside = np.clip(offset, 0, self._lengths[episode][:, None] - 1)
        return self._starts[episode][:, None] + inside

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` windows, uniform over all of them."""
        return self.rows(rng.integers(0, len(self), size=count))

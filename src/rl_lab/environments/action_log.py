"""The actions of the running episodes: what bringing an environment back needs."""

from __future__ import annotations

import numpy as np


class ActionLog:
    """Actions of every environment since its episode began. Constant cost per step; forgets what has ended."""

    def __init__(self, num_envs: int, shape: tuple[int, ...], dtype: str) -> None:
        self._buffer = np.zeros((1024, num_envs, *shape), dtype)
        self._length = 0
        self._start = np.zeros(num_envs, np.int64)

    def clear(self) -> None:
        self._length = 0
        self._start[:] = 0

    def append(self, action: np.ndarray) -> None:
        if self._length == len(self._buffer):
            self._make_room()
        self._buffer[self._length] = action
        self._length += 1

    def begin(self, index: int) -> None:
        """Environment `index` starts from a reset: its earlier actions are not needed any more."""
        self._start[index] = self._length

    def actions(self, index: int) -> np.ndarray:
        """[time, *shape] of the running episode."""
        return self._buffer[self._start[index] : self._length, index]

    def load(self, actions: list[np.ndarray]) -> None:
        """Take over the actions of every environment."""
        self._length = max((len(part) for part in actions), default=0)
        size = max(1024, 2 * self._length)
        self._buffer = np.zeros((size, *self._buffer.shape[1:]), self._buffer.dtype)
        for index, part in enumerate(actions):
            self._start[index] = self._length - len(part)
            self._buffer[self._start[index] : self._length, index] = part

    def _make_room(self) -> None:
        first = int(self._start.min())
        kept = self._buffer[first : self._length]
        buffer = self._buffer
        if len(kept) > len(buffer) // 2:
            buffer = np.zeros((2 * len(buffer), *buffer.shape[1:]), buffer.dtype)
        buffer[: len(kept)] = kept.copy()
        self._buffer = buffer
        self._length -= first
        self._start -= first

"""Rows in memory-mapped files: larger than RAM, kept in place, and able to go back to a checkpoint."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from rl_lab.buffers import capacity as room
from rl_lab.buffers.journal import UndoJournals
from rl_lab.buffers.saving import field_file
from rl_lab.buffers.storage import HostStorage, row_bytes
from rl_lab.errors import DataError
from rl_lab.records import FieldSpec


class DiskStorage(HostStorage):
    """One file a field, mapped and shared: what was written survives the death of the process (not of the machine).

    Journal n belongs to the n-th checkpoint that was begun; it is in use from `begin_checkpoint` on, so nothing depends
    on whether that checkpoint came to be.
    """

    def __init__(
        self, fields: Mapping[str, FieldSpec], rows: int, folder: Path, *, num_envs: int, keep_checkpoints: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._length, self._keep = folder, rows // num_envs, max(1, keep_checkpoints)
        self._lock: int | None = _lock(folder)
        self._require_room(fields, rows)
        super().__init__(fields, rows)
        self._numbers = {name: number for number, name in enumerate(self.fields)}
        self._bytes = {name: array.reshape(rows, -1).view(np.uint8) for name, array in self.arrays.items()}
        self._journals = UndoJournals(folder, [row_bytes(spec) for spec in self.fields.values()])
        self._journal: int | None = None  # None: neither started afresh nor gone back to a checkpoint yet
        self._committed: list[int] = []
        self._protect_from(np.zeros(num_envs, np.int64))

    def _require_room(self, fields: Mapping[str, FieldSpec], rows: int) -> None:
        each = sum(row_bytes(spec) for spec in fields.values())
        present = sum(path.stat().st_blocks * 512 for path in self._folder.glob("*.rows"))
        room.require(
            rows * each - present,
            room.available_disk(self._folder),
            what=f"disk under {self._folder}",
            capacity=rows,
            bytes_per_record=each,
            other=", or put run_root on a larger disk",
        )

    def _allocate(self, name: str, spec: FieldSpec) -> np.ndarray:
        path, size = self._folder / field_file(name, "rows"), self.rows * row_bytes(spec)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(file).st_size != size:  # new, or left by a start that was cut off
                os.ftruncate(file, 0)
                _reserve(file, size)
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            raise DataError(
                f"{path}: cannot reserve {room.gigabytes(size)} ({reason}). Lower data_sources.replay.capacity or put "
                "run_root on a larger disk."
            ) from error
        finally:
            os.close(file)
        return np.asarray(np.memmap(path, spec.dtype, "r+", shape=(self.rows, *spec.shape)))

    def write(self, name: str, rows: np.ndarray, values: np.ndarray | Tensor) -> None:
        if self._journal is None:
            self._start_afresh()
        self._protect(name, rows)
        super().write(name, rows, values)

    def _protect(self, name: str, rows: np.ndarray) -> None:
        """Journal the rows that the last checkpoint knows and that were not journaled since."""
        stream, slot = np.divmod(rows, self._length)
        kept = self._kept[name]
        old = np.unique(rows[(slot < self._known[stream]) & ~kept[rows]])
        if len(old):
            self._journals.append(self._numbers[name], old, self._bytes[name][old])
            kept[old] = True

    def _protect_from(self, held: np.ndarray) -> None:
        """From now on changes to the rows that hold records now are journaled."""
        self._known = held.copy()
        self._kept = {name: np.zeros(self.rows, bool) for name in self.fields}

    def _start_afresh(self) -> None:
        """A run from its beginning: what lies here is from one that no checkpoint remembers."""
        numbers = self._journals.numbers()
        self._open_journal(max(numbers, default=-1) + 1)
        self._journals.drop(before=self._journal_number())

    def _open_journal(self, number: int) -> None:
        self._journals.open(number)
        self._journal = number

    def _journal_number(self) -> int:
        assert self._journal is not None
        return self._journal

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def begin_checkpoint(self, held: np.ndarray) -> dict[str, int | list[int]]:
        """The state that a checkpoint of this moment must hold. Rows of `held` records a stream are kept from now
        on."""
        if self._journal is None:
            self._start_afresh()
        self._open_journal(self._journal_number() + 1)
        self._protect_from(held)
        return {"number": self._journal_number(), "committed": list(self._committed)}

    def checkpoint_committed(self) -> None:
        """The last begun checkpoint is in its place: journals of checkpoints that are too old can go."""
        self._committed = [*self._committed, self._journal_number()][-self._keep :]
        self._journals.drop(before=self._committed[0])

    def go_back(self, state: Mapping[str, int | list[int]], held: np.ndarray) -> None:
        number, committed = state["number"], state["committed"]
        assert isinstance(number, int)
        assert isinstance(committed, list)
        names = list(self.fields)

        def restore(field: int, rows: np.ndarray, old: np.ndarray) -> None:
            self._bytes[names[field]][rows] = old

        self._journals.undo(number, restore)
        self._journal = number
        self._committed = [*committed, number][-self._keep :]
        self._protect_from(held)

    def close(self) -> None:
        self._journals.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int:
    """Two processes must not write the same files. The lock goes with the process, however it ends."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DataError(f"{folder}: another process uses this disk replay. Wait for that run or stop it.") from error
    return lock


def _reserve(file: int, size: int) -> None:
    """Take the space now: a mapped file that meets a full disk later would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)

"""Undo journals: what lets memory-mapped rows go back to an earlier checkpoint, whenever the process was killed.

Before a row that existed at the last checkpoint is changed for the first time since, its old bytes are appended to the
journal of that checkpoint. Journal n leads from any later moment, up to the next checkpoint, back to checkpoint n; so
checkpoint k is reached by undoing all journals from the newest down to k, each from its end to its start.

A process may die anywhere. The old bytes are with the operating system before the row is touched, so a row that was
changed has its entry. An entry that was cut off has a wrong length or checksum; its row was not touched yet. Undoing
twice does the same as undoing once, and journals are removed only afterwards, newest first, so that may be cut off too.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rl_lab.errors import CheckpointError, DataError

HEADER = struct.Struct("<IIHHQ")  # checksum of all that follows, magic, field, reserved, rows
MAGIC = 0x4C4A524E
Restore = Callable[[int, np.ndarray, np.ndarray], None]  # field number, rows, old bytes [rows, row bytes]


class UndoJournals:
    """The numbered journals of one folder; the newest is written to."""

    def __init__(self, folder: Path, row_sizes: list[int]) -> None:
        self._folder, self._row_sizes = folder, row_sizes
        self._file: int | None = None
        self._end = 0

    def numbers(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob("journal-*.undo"))

    def open(self, number: int) -> None:
        """Start journal `number`, empty."""
        self.close()
        self._file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._end = 0

    def append(self, field: int, rows: np.ndarray, old: np.ndarray) -> None:
        """Keep the bytes [rows, row bytes] that rows of a field have now."""
        assert self._file is not None
        parts = [HEADER.pack(0, MAGIC, field, 0, len(rows))[4:], rows.astype("<i8").tobytes(), old.tobytes()]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        entry = b"".join([struct.pack("<I", checksum), *parts])
        try:
            view = memoryview(entry)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            os.ftruncate(self._file, self._end)  # later entries must not stand behind a broken one
            raise DataError(
                f"{self._folder}: the disk replay could not write its journal ({error.strerror}). The last checkpoint "
                "is not affected: free some space and resume the run."
            ) from error
        self._end += len(entry)

    def undo(self, number: int, restore: Restore) -> None:
        """Go back to checkpoint `number`: restore every old row, then empty that journal and remove those after it."""
        numbers = self.numbers()
        if number not in numbers:
            raise CheckpointError(
                f"{self._folder}: the disk replay has no journal {number}, so it cannot go back to this checkpoint. "
                "Resume from the run's latest one, in its own directory (data_sources.replay.keep_checkpoints says how "
                "many of the last ones can be gone back to)."
            )
        later = [other for other in reversed(numbers) if other >= number]
        for other in later:
            for entry in reversed(list(self._entries(other))):
                restore(*self._read(other, *entry))
        for other in later[:-1]:
            self._path(other).unlink()
        self.open(number)

    def drop(self, *, before: int) -> None:
        for number in self.numbers():
            if number < before:
                self._path(number).unlink()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self._folder / f"journal-{number:08d}.undo"

    def _entries(self, number: int) -> Iterator[tuple[int, int, int]]:
        """(offset of the rows, field, rows) of every whole entry."""
        with open(self._path(number), "rb") as file:
            end = os.fstat(file.fileno()).st_size
            while len(header := file.read(HEADER.size)) == HEADER.size:
                checksum, magic, field, _, count = HEADER.unpack(header)
                if magic != MAGIC or field >= len(self._row_sizes):
                    return
                offset, size = file.tell(), count * (8 + self._row_sizes[field])
                if size > end - offset:
                    return
                body = file.read(size)
                if zlib.crc32(body, zlib.crc32(header[4:])) != checksum:
                    return
                yield offset, field, count

    def _read(self, number: int, offset: int, field: int, count: int) -> tuple[int, np.ndarray, np.ndarray]:
        with open(self._path(number), "rb") as file:
            file.seek(offset)
            rows = np.frombuffer(file.read(8 * count), "<i8")
            old = np.frombuffer(file.read(count * self._row_sizes[field]), np.uint8)
        return field, rows, old.reshape(count, -1)

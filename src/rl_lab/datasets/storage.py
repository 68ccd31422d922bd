"""Where the records of a dataset lie while a run learns from them: in memory, or in files read window by window."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rl_lab.buffers.saving import field_file
from rl_lab.buffers.storage import HostStorage, row_bytes
from rl_lab.datasets.formats.folder import RowsWriter
from rl_lab.errors import DataError
from rl_lab.records import Fields, FieldSpec

SMALL_FIELD = 64 << 20  # bytes; a field of this size is kept in memory even where the dataset is not


class DatasetStorage(HostStorage):
    """Records that do not change. Fields of `files` are read with one call a window, straight into the batch: the
    operating system's page cache is the only cache, and the process's own memory stays small."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], files: Mapping[str, tuple[Path, FieldSpec]], rows: int
    ) -> None:
        self._given, self._paths = dict(arrays), {name: path for name, (path, _) in files.items()}
        self._descriptors: dict[str, int] = {}
        specs = {name: FieldSpec(value.shape[1:], str(value.dtype)) for name, value in arrays.items()}
        super().__init__(specs | {name: spec for name, (_, spec) in files.items()}, rows)

    def _allocate(self, name: str, spec: FieldSpec) -> np.ndarray:
        if name in self._given:
            return self._given.pop(name)
        self._descriptors[name] = os.open(self._paths[name], os.O_RDONLY)
        return np.empty((0, *spec.shape), spec.dtype)

    def gather(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        """`rows` [windows, time] must rise by 0 or 1 within a window."""
        if name not in self._descriptors:
            super().gather(name, rows, out)
            return
        size, length = row_bytes(self.fields[name]), rows.shape[1]
        flat = out.reshape(-1).view(np.uint8).data
        firsts, lasts = rows[:, 0].tolist(), rows[:, -1].tolist()
        for window, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            target = flat[window * length * size : (window + 1) * length * size]
            if last - first == length - 1:
                self._read(name, target, first * size)
                continue
            block = np.empty((last - first + 1, size), np.uint8)  # a window that repeats records at its ends
            self._read(name, block.reshape(-1).data, first * size)
            target[:] = block[rows[window] - first].reshape(-1).data

    def _read(self, name: str, target: memoryview, offset: int) -> None:
        descriptor = self._descriptors[name]
        while target:
            count = os.preadv(descriptor, [target], offset)
            if not count:
                row = offset // row_bytes(self.fields[name])
                raise DataError(f"{self._paths[name]}, field '{name}': ends in row {row}. The file was cut off.")
            target, offset = target[count:], offset + count

    def resident_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def file_bytes(self) -> int:
        return sum(row_bytes(self.fields[name]) * self.rows for name in self._descriptors)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


class RecordStore:
    """Takes records in, in memory at first; beyond `budget` bytes it goes on in files of `folder`."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget, self._bytes, self._rows = folder, budget, 0, 0
        self._parts: list[Fields] = []
        self._writer: RowsWriter | None = None

    def append(self, records: Fields) -> None:
        self._rows += len(records["action"])
        self._bytes += sum(value.nbytes for value in records.values())
        if self._writer is None:
            self._parts.append(records)
            if self._bytes > self._budget:
                self._spill()
        else:
            self._writer.append(records)

    def _spill(self) -> None:
        self._writer = RowsWriter(self._folder)
        for part in self._parts:
            self._writer.append(part)
        self._parts = []

    def finish(self) -> DatasetStorage:
        """Everything that was taken in. There must be something."""
        if self._writer is None:
            names = list(self._parts[0])
            arrays = {}
            for name in names:  # one at a time, so that no more than one is held twice
                arrays[name] = np.concatenate([part.pop(name) for part in self._parts])
            return DatasetStorage(arrays, {}, self._rows)
        self._writer.close()
        files = {name: (self._folder / field_file(name, "rows"), spec) for name, spec in self._writer.fields.items()}
        return open_rows(files, self._rows)


def open_rows(files: Mapping[str, tuple[Path, FieldSpec]], rows: int) -> DatasetStorage:
    """Rows that lie in files: small fields are loaded, large ones stay there."""
    small = {name for name, (_, spec) in files.items() if row_bytes(spec) * rows <= SMALL_FIELD}
    arrays = {
        name: np.fromfile(path, spec.dtype).reshape(rows, *spec.shape)
        for name, (path, spec) in files.items()
        if name in small
    }
    return DatasetStorage(arrays, {name: file for name, file in files.items() if name not in small}, rows)

"""Filled rows to and from .npy files: one file a field, written as they lie, without a second copy in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from rl_lab.buffers.storage import Storage, row_bytes
from rl_lab.errors import CheckpointError

CHUNK_BYTES = 64 << 20


def save_rows(storage: Storage, held: np.ndarray, folder: Path) -> None:
    """The first `held[stream]` rows of every stream."""
    folder.mkdir(parents=True, exist_ok=True)
    length = storage.rows // len(held)
    for name, spec in storage.fields.items():
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(spec.dtype)), "fortran_order": False}
        with open(folder / field_file(name, "npy"), "wb") as file:
            np.lib.format.write_array_header_2_0(file, header | {"shape": (int(held.sum()), *spec.shape)})
            for stream, count in enumerate(held.tolist()):
                for start, stop in _chunks(storage, name, stream * length, count):
                    rows = np.ascontiguousarray(storage.read_range(name, start, stop))
                    file.write(rows.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())


def load_rows(storage: Storage, held: np.ndarray, folder: Path) -> None:
    """Read the files of `save_rows` into a storage with the same number of streams; `held` rows of each."""
    length = storage.rows // len(held)
    load_streams(storage, held, folder, [stream * length for stream in range(len(held))])


def load_streams(storage: Storage, held: np.ndarray, folder: Path, places: Sequence[int | None]) -> None:
    """Read the files of `save_rows`, with `held` rows of each stream, into a storage. The rows of a stream begin at its
    place; those of one whose place is None are left out."""
    for name, spec in storage.fields.items():
        path, expected = folder / field_file(name, "npy"), (int(held.sum()), *spec.shape)
        try:
            saved = np.load(path, mmap_mode="r" if expected[0] else None)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the checkpoint's replay data is missing or cut off ({error}). Resume from an earlier one."
            ) from error
        if saved.shape != expected or saved.dtype != np.dtype(spec.dtype):
            raise CheckpointError(
                f"{path}: holds {saved.dtype} {saved.shape}, expected {spec.dtype} {expected}. The checkpoint belongs "
                "to a run with other observations or another model size."
            )
        for rows, place in zip(np.split(saved, np.cumsum(held)[:-1]), places, strict=True):
            if place is None:
                continue
            for start, stop in _chunks(storage, name, 0, len(rows)):
                storage.write_range(name, place + start, rows[start:stop])


def field_file(name: str, suffix: str) -> str:
    """A file name for a field, whatever characters an observation key has."""
    return f"{quote(name, safe='')}.{suffix}"


def _chunks(storage: Storage, name: str, first: int, count: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK_BYTES // max(row_bytes(storage.fields[name]), 1))
    for start in range(first, first + count, step):
        yield start, min(start + step, first + count)

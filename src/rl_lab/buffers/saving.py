"""Filled rows to and from .npy files: one file a field, written as they lie, without a second copy in memory."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import numpy as np

from rl_lab.buffers.storage import Storage, row_bytes
from rl_lab.errors import CheckpointError

CHUNK_BYTES = 64 << 20


def save_rows(storage: Storage, held: np.ndarray, folder: Path) -> None:
    """The first `held[stream]` rows of every stream."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, spec in storage.fields.items():
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(spec.dtype)), "fortran_order": False}
        with open(folder / field_file(name, "npy"), "wb") as file:
            np.lib.format.write_array_header_2_0(file, header | {"shape": (int(held.sum()), *spec.shape)})
            for start, stop in _chunks(storage, held, name):
                rows = np.ascontiguousarray(storage.read_range(name, start, stop))
                file.write(rows.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())


def load_rows(storage: Storage, held: np.ndarray, folder: Path) -> None:
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
        offset = 0
        for start, stop in _chunks(storage, held, name):
            storage.write_range(name, start, saved[offset : offset + stop - start])
            offset += stop - start


def field_file(name: str, suffix: str) -> str:
    """A file name for a field, whatever characters an observation key has."""
    return f"{quote(name, safe='')}.{suffix}"


def _chunks(storage: Storage, held: np.ndarray, name: str) -> list[tuple[int, int]]:
    length, step = storage.rows // len(held), max(1, CHUNK_BYTES // max(row_bytes(storage.fields[name]), 1))
    return [
        (stream * length + start, stream * length + min(start + step, count))
        for stream, count in enumerate(held.tolist())
        for start in range(0, count, step)
    ]

"""The sequence ring buffer: blocks of records in, windows of records out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.storage import HostStorage, Storage, row_bytes, torch_dtype
from rl_lab.buffers.streams import StreamIndex
from rl_lab.buffers.worker import OrderedWorker
from rl_lab.errors import DataError, nearest
from rl_lab.records import RecordBlock

STAGED_BLOCKS = 64
STAGED_BYTES = 16 << 20


class SequenceRing:
    """Streams of records, one for each environment, in a storage of fixed size.

    New blocks are only noted, and written many at a time: a scatter of 500 rows costs hardly more than one of 8.
    Everything that looks at the records flushes first. Counters move at once; data is moved by the worker, in order.
    """

    def __init__(self, *, storage: Storage, num_envs: int, worker: OrderedWorker) -> None:
        self.storage, self.worker, self.num_envs = storage, worker, num_envs
        self.index = StreamIndex(num_envs=num_envs, length=storage.rows // num_envs)
        self._dtypes = {name: np.dtype(spec.dtype) for name, spec in storage.fields.items()}
        self._full_shapes = {name: (num_envs, *spec.shape) for name, spec in storage.fields.items()}
        self._staged: list[RecordBlock] = []
        block_bytes = num_envs * sum(row_bytes(spec) for spec in storage.fields.values())
        # At most one round of the ring at a time: no row is written twice in one flush.
        self._staged_limit = max(1, min(STAGED_BLOCKS, STAGED_BYTES // max(block_bytes, 1), self.index.length - 1))

    def add(self, block: RecordBlock) -> None:
        shapes, dtypes, indices = self._full_shapes, self._dtypes, block.indices
        for name, value in block.fields.items():
            expected = shapes.get(name)
            if expected is None:
                raise DataError(
                    f"A record has the field '{name}', which the run did not declare.{nearest(name, shapes)}"
                )
            seen = value.shape
            if seen != expected and (indices is None or seen != (len(indices), *expected[1:])):
                self._refuse_shape(name, seen, indices)
            if value.dtype != dtypes[name]:
                self._check_dtype(name, value.dtype)
        self._staged.append(block)
        if len(self._staged) >= self._staged_limit:
            self.flush()

    def flush(self) -> None:
        """Give the staged blocks their rows and write them."""
        if not self._staged:
            return
        blocks, self._staged = self._staged, []
        rows = self.index.append([block.indices for block in blocks])
        self.worker.run(lambda: self._write_blocks(blocks, rows))

    def _write_blocks(self, blocks: list[RecordBlock], rows: np.ndarray) -> None:
        for name, shape in self._full_shapes.items():
            parts = [block.fields.get(name) for block in blocks]
            filled = [self._zeros(name, shape, blocks[i]) if part is None else part for i, part in enumerate(parts)]
            values = filled[0] if len(filled) == 1 else np.concatenate(filled)
            self.storage.write(name, rows, values)
            if name == "is_first":
                first = rows[values.astype(bool, copy=False)]
        if "is_first" in self._full_shapes and len(first):
            self._close_interrupted(first)

    def _zeros(self, name: str, shape: tuple[int, ...], block: RecordBlock) -> np.ndarray:
        count = self.num_envs if block.indices is None else len(block.indices)
        return np.broadcast_to(np.zeros((), self._dtypes[name]), (count, *shape[1:]))

    def _close_interrupted(self, first: np.ndarray) -> None:
        """An episode that was abandoned ends with the record before the next `is_first`, like any other."""
        before = self.index.previous_rows(first)
        self.storage.write("is_last", before, np.ones(len(before), bool))

    def update(self, ids: np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        """Write fields of records anew. Records that were overwritten in the meantime are left alone."""
        self.flush()
        flat = np.asarray(ids, np.int64).reshape(-1)
        alive, rows = self.index.locate(flat)
        chosen = None if len(rows) == len(flat) else np.flatnonzero(alive)
        for name, value in fields.items():
            spec = self.storage.fields.get(name)
            if spec is None:
                raise DataError(f"update: the replay stores no field '{name}'.{nearest(name, self.storage.fields)}")
            if tuple(value.shape) != (*ids.shape, *spec.shape):
                raise DataError(
                    f"update: field '{name}' has shape {tuple(value.shape)}, expected {(*ids.shape, *spec.shape)} "
                    f"for indices of shape {tuple(ids.shape)}."
                )
            flat_value = value.reshape(len(flat), *spec.shape)
            if len(rows):
                self._schedule(name, rows, flat_value, chosen)

    def _schedule(self, name: str, rows: np.ndarray, value: Tensor | np.ndarray, chosen: np.ndarray | None) -> None:
        ready: torch.cuda.Event | None = None
        if isinstance(value, Tensor):
            value = value.detach().to(torch_dtype(self.storage.fields[name].dtype))
            if value.is_cuda and isinstance(self.storage, HostStorage):
                value = value.to("cpu", non_blocking=True)  # into pinned memory; only the worker waits for it
                ready = torch.cuda.Event()
                ready.record()
        if ready is None and self.worker.threaded:  # the caller may use its memory again before the worker comes to it
            value = value.clone() if isinstance(value, Tensor) else value.copy()
        source = value

        def write() -> None:
            if ready is not None:
                ready.synchronize()
            self.storage.write(name, rows, source if chosen is None else source[chosen])

        self.worker.run(write)

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.index.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._staged.clear()
        self.index.load_state_dict(state)

    # Complaints -------------------------------------------------------------------------------------------------------

    def _refuse_shape(self, name: str, seen: tuple[int, ...], indices: np.ndarray | None) -> None:
        count = self.num_envs if indices is None else len(indices)
        raise DataError(
            f"Field '{name}' of a record block has shape {tuple(seen)}, expected "
            f"{(count, *self._full_shapes[name][1:])}: {count} environments, then the declared shape. Check what the "
            "environment or the workflow returns for it."
        )

    def _check_dtype(self, name: str, seen: np.dtype) -> None:
        if not np.can_cast(seen, self._dtypes[name], "same_kind"):
            raise DataError(
                f"Field '{name}' of a record block has dtype {seen}, expected {self._dtypes[name]}. "
                "Convert it where it is made, or declare the dtype that it has."
            )

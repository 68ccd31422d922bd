"""The sequence ring buffer: blocks of records in, windows of records out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.storage import HostStorage, Storage, row_bytes, torch_dtype, upload
from rl_lab.buffers.streams import StreamIndex
from rl_lab.buffers.worker import OrderedWorker
from rl_lab.errors import DataError, nearest
from rl_lab.records import RecordBlock

STAGED_BLOCKS = 64
STAGED_BYTES = 16 << 20


class SequenceRing:
    """Streams of records, one for each environment, in a storage of fixed size.

    New records are staged, and written many at a time: a scatter of 500 rows costs hardly more than one of 8.
    Everything that looks at the records flushes first. Counters move at once; data is moved by the worker, in order.
    The storage must have the fields `is_first` and `is_last`.
    """

    def __init__(self, *, storage: Storage, num_envs: int, worker: OrderedWorker) -> None:
        self.storage, self.worker, self.num_envs = storage, worker, num_envs
        self.index = StreamIndex(num_envs=num_envs, length=storage.rows // num_envs)
        fields = storage.fields
        self._expected = {name: ((num_envs, *spec.shape), np.dtype(spec.dtype)) for name, spec in fields.items()}
        block_bytes = num_envs * sum(row_bytes(spec) for spec in fields.values())
        # At most one round of the ring at a time: no row is written twice in one flush.
        blocks = max(1, min(STAGED_BLOCKS, STAGED_BYTES // max(block_bytes, 1), self.index.length - 1))
        self._staged_rows, self._staged = 0, list[np.ndarray | None]()  # the environments of every staged block
        self._staged_limit = blocks
        self._staging = {name: np.empty((blocks * num_envs, *spec.shape), spec.dtype) for name, spec in fields.items()}

    def add(self, block: RecordBlock) -> None:
        indices, expected, fields = block.indices, self._expected, block.fields
        for name, value in fields.items():
            # The slow check judges; this one only tells that there is nothing to judge.
            if indices is not None or expected.get(name) != (value.shape, value.dtype):
                self._check(name, value, self.num_envs if indices is None else len(indices))
        start = self._staged_rows
        stop = self._staged_rows = start + (self.num_envs if indices is None else len(indices))
        for name, staging in self._staging.items():
            staging[start:stop] = fields.get(name, 0)
        self._staged.append(indices)
        if len(self._staged) >= self._staged_limit:
            self.flush()

    def flush(self) -> None:
        """Give the staged records their rows and write them."""
        if not self._staged:
            return
        rows, count = self.index.append(self._staged), self._staged_rows
        self._staged, self._staged_rows = [], 0
        if not count:
            return
        values = {name: staging[:count] for name, staging in self._staging.items()}
        if self.worker.threaded:  # the next records may arrive before these are written
            values = {name: value.copy() for name, value in values.items()}
        self.worker.run(lambda: self._write(values, rows))

    def _write(self, values: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        for name, value in values.items():
            self.storage.write(name, rows, value)
        first = rows[values["is_first"].astype(bool, copy=False)]
        if len(first):  # only now: the records before these may be among the others
            self._close_interrupted(first)

    def _close_interrupted(self, first: np.ndarray) -> None:
        """An episode that was abandoned ends with the record before the next `is_first`, like any other."""
        before = self.index.previous_rows(first)
        self.storage.write("is_last", before, np.ones(len(before), bool))

    def update(self, ids: np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        """Write fields of records anew. Records that were overwritten in the meantime are left alone. Where a record
        comes twice, the later values stay: a device would do either write first, in each field anew."""
        self.flush()
        flat = np.asarray(ids, np.int64).reshape(-1)
        alive, rows = self.index.locate(flat)
        chosen = None
        last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
        if len(last) < len(flat):
            chosen, rows = np.flatnonzero(alive)[last], rows[last]
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
            self.storage.write(name, rows, source if chosen is None else _rows_of(source, chosen))

        self.worker.run(write)

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.index.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._staged, self._staged_rows = [], 0
        self.index.load_state_dict(state)

    # Complaints -------------------------------------------------------------------------------------------------------

    def _check(self, name: str, value: np.ndarray, count: int) -> None:
        spec = self.storage.fields.get(name)
        if spec is None:
            valid = nearest(name, self.storage.fields)
            raise DataError(f"A record has the field '{name}', which the run did not declare.{valid}")
        if value.shape != (count, *spec.shape):
            raise DataError(
                f"Field '{name}' of a record block has shape {value.shape}, expected {(count, *spec.shape)}: {count} "
                "environments, then the declared shape. Check what the environment or the workflow returns for it."
            )
        if not np.can_cast(value.dtype, spec.dtype, "same_kind"):
            raise DataError(
                f"Field '{name}' of a record block has dtype {value.dtype}, expected {spec.dtype}. Convert it where it "
                "is made, or declare the dtype that it has."
            )


def _rows_of(values: Tensor | np.ndarray, rows: np.ndarray) -> Tensor | np.ndarray:
    """Without waiting for the device that the values are on."""
    return values.index_select(0, upload(rows, values.device)) if isinstance(values, Tensor) else values[rows]

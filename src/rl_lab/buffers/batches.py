"""Gathers windows into tensors on the device of the learner."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from rl_lab.buffers.storage import DeviceStorage, HostStorage, Storage, torch_dtype, upload

BatchTensors = dict[str, Tensor]  # field -> [batch, time, ...]
CACHE_LINE = 64  # bytes


class BatchGatherer:
    """Turns rows into tensors. `hand_over` must be called, in the learner's thread, before a batch is used."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._pool = ArrayPool()
        self._pinned: dict[tuple, list[_PinnedSet]] = {}
        self._stream: torch.cuda.Stream | None = None

    def gather(self, rows: np.ndarray, names: Sequence[str], device: str) -> GatheredBatch:
        """Copy the fields of `rows` [batch, time]. May run in a background thread."""
        storage = self._storage
        if isinstance(storage, DeviceStorage):
            chosen = upload(rows.ravel(), storage.device)
            tensors = {name: storage.gather(name, chosen).unflatten(0, rows.shape) for name in names}
            return GatheredBatch({name: tensor.to(device) for name, tensor in tensors.items()})
        assert isinstance(storage, HostStorage)
        if device.startswith("cuda"):
            return self._gather_pinned(storage, rows, names, device)
        arrays = self.gather_arrays(rows, names)
        return GatheredBatch({name: torch.from_numpy(array) for name, array in arrays.items()})

    def gather_arrays(self, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The same from host memory, as arrays [*rows, ...]."""
        storage, arrays = self._storage, {}
        assert isinstance(storage, HostStorage)
        for name in names:
            spec = storage.fields[name]
            array = arrays[name] = self._pool.take((*rows.shape, *spec.shape), spec.dtype)
            storage.gather(name, rows, array)
        return arrays

    def _gather_pinned(
        self, storage: HostStorage, rows: np.ndarray, names: Sequence[str], device: str
    ) -> GatheredBatch:
        """Through pinned memory, copied by a stream of its own while the learner computes."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        pair = self._pinned.setdefault((rows.shape, tuple(names)), [])
        if len(pair) < 2:
            pair.append(_PinnedSet(storage, rows.shape, names))
        buffers = pair[-1]
        pair.reverse()  # two sets in turn: one is filled while the other is still being copied
        buffers.copied.synchronize()
        for name in names:
            storage.gather(name, rows, buffers.tensors[name].numpy())
        with torch.cuda.stream(self._stream):
            tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in buffers.tensors.items()}
        buffers.copied.record(self._stream)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        return GatheredBatch(tensors, arrived)


class GatheredBatch:
    """A batch on its way to the device."""

    def __init__(self, tensors: BatchTensors, arrived: torch.cuda.Event | None = None) -> None:
        self._tensors, self._arrived = tensors, arrived

    def hand_over(self) -> BatchTensors:
        """The tensors, ordered before whatever the calling thread's stream does next."""
        if self._arrived is not None:
            stream = torch.cuda.current_stream(next(iter(self._tensors.values())).device)
            stream.wait_event(self._arrived)
            for tensor in self._tensors.values():
                tensor.record_stream(stream)  # else the copying stream could take the memory back too early
        return self._tensors


class _PinnedSet:
    def __init__(self, storage: HostStorage, shape: tuple[int, ...], names: Sequence[str]) -> None:
        specs = {name: storage.fields[name] for name in names}
        self.tensors = {
            name: torch.empty((*shape, *spec.shape), dtype=torch_dtype(spec.dtype), pin_memory=True)
            for name, spec in specs.items()
        }
        self.copied = torch.cuda.Event()


class ArrayPool:
    """Host memory for batches, used again once nobody holds it.

    Fresh memory of this size costs a page fault every 4 KiB, more than the copy itself. A tensor made from an array,
    and every view of it, holds a reference to the array, so the reference count says whether the array is free.
    """

    KEPT = 4  # of one kind; more are made when the caller holds on to its batches, and forgotten again
    SMALL = 1 << 16  # bytes; below this the allocator is fast enough

    def __init__(self) -> None:
        self._arrays: dict[tuple, list[np.ndarray]] = {}  # flat

    def take(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        count = prod(shape)
        if count * np.dtype(dtype).itemsize < self.SMALL:
            return np.empty(shape, dtype)
        kept = self._arrays.setdefault((shape, dtype), [])
        for position in range(len(kept)):
            if sys.getrefcount(kept[position]) <= _FREE:
                return kept[position].reshape(shape)
        array = _aligned(count, dtype)
        kept.append(array)
        if len(kept) > self.KEPT:
            del kept[0]
        return array.reshape(shape)


def _aligned(count: int, dtype: str) -> np.ndarray:
    """A flat array that begins at a line of the cache. NumPy's own begin anywhere; copies into those are up to a fifth
    slower.

    Its views, and theirs, refer to this array, as its memory is no array but a memoryview.
    """
    memory = np.empty(count * np.dtype(dtype).itemsize + CACHE_LINE, np.uint8)
    return np.frombuffer(memory.data, dtype, count, offset=-memory.ctypes.data % CACHE_LINE)


def _references_when_free() -> int:
    kept = [np.empty(0)]
    return sys.getrefcount(kept[0])


_FREE = _references_when_free()

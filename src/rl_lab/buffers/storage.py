"""Where records lie: in host memory or on the GPU. A row is one record; rows hold no order of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from rl_lab.records import FieldSpec


def row_bytes(spec: FieldSpec) -> int:
    return prod(spec.shape) * np.dtype(spec.dtype).itemsize


def torch_dtype(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """To the device, without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Storage(ABC):
    """Rows of fields, written and read by row number."""

    def __init__(self, fields: Mapping[str, FieldSpec], rows: int) -> None:
        self.fields, self.rows = dict(fields), rows

    @abstractmethod
    def write(self, name: str, rows: np.ndarray, values: np.ndarray | Tensor) -> None:
        """Set one field of some rows. Where a row comes twice the later value stays (on the host)."""

    @abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> np.ndarray:
        """One field of consecutive rows, to be saved. Not to be written to."""

    @abstractmethod
    def write_range(self, name: str, start: int, values: np.ndarray) -> None:
        """One field of consecutive rows, from a saved copy."""

    def close(self) -> None:  # noqa: B027
        """Release what the process holds outside its memory."""


class HostStorage(Storage):
    """NumPy arrays. Memory is taken page by page as rows are first written: a large capacity costs nothing at first."""

    def __init__(self, fields: Mapping[str, FieldSpec], rows: int) -> None:
        super().__init__(fields, rows)
        self.arrays = {name: self._allocate(name, spec) for name, spec in self.fields.items()}
        # A row as one opaque item: NumPy scatters those several times faster than small sub-arrays.
        self._opaque = {name: _opaque(array) for name, array in self.arrays.items()}

    def _allocate(self, name: str, spec: FieldSpec) -> np.ndarray:
        return np.zeros((self.rows, *spec.shape), spec.dtype)

    def write(self, name: str, rows: np.ndarray, values: np.ndarray | Tensor) -> None:
        source = values.numpy() if isinstance(values, Tensor) else values
        if self.fields[name].shape:
            source = _opaque(np.ascontiguousarray(source, self.fields[name].dtype))
        self._opaque[name][rows] = source

    def gather(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy one field of `rows` into `out`, at the speed of memory."""
        # In the mode "raise" NumPy would copy through a buffer of its own. The rows come from the index: all are valid.
        self.arrays[name].take(rows, axis=0, out=out, mode="clip")

    def read_range(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.arrays[name][start:stop]

    def write_range(self, name: str, start: int, values: np.ndarray) -> None:
        self.arrays[name][start : start + len(values)] = values


def _opaque(array: np.ndarray) -> np.ndarray:
    if array.ndim == 1:  # numbers are items already
        return array
    size = array.itemsize * prod(array.shape[1:])
    if not size or not len(array):
        return array
    return array.reshape(len(array), -1).view(f"V{size}")[:, 0]


class DeviceStorage(Storage):
    """Tensors on the device. Rows are chosen on the host and read and written there: nothing waits for the device."""

    def __init__(self, fields: Mapping[str, FieldSpec], rows: int, device: torch.device | str) -> None:
        super().__init__(fields, rows)
        self.device = torch.device(device)
        self.tensors = {
            name: torch.zeros((rows, *spec.shape), dtype=torch_dtype(spec.dtype), device=self.device)
            for name, spec in self.fields.items()
        }

    def write(self, name: str, rows: np.ndarray, values: np.ndarray | Tensor) -> None:
        source = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
        target = self.tensors[name]
        target.index_copy_(0, upload(rows, self.device), source.to(self.device, non_blocking=True).to(target.dtype))

    def gather(self, name: str, rows: Tensor) -> Tensor:
        return self.tensors[name].index_select(0, rows)

    def read_range(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.tensors[name][start:stop].cpu().numpy()

    def write_range(self, name: str, start: int, values: np.ndarray) -> None:
        self.tensors[name][start : start + len(values)] = torch.tensor(values, device=self.device)

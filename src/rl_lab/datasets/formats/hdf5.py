"""What the HDF5 formats share: opening files, and columns that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_lab.datasets.formats.base import unreadable

ENVIRONMENT, RECORDED_FROM = "environment", "recorded_from"


def open_file(path: Path, mode: str = "r") -> Any:
    """An open file, or one line that says what is wrong with it."""
    import h5py

    try:
        return h5py.File(path, mode)
    except OSError as error:
        raise unreadable(path, error) from error


def is_hdf5(path: Path) -> bool:
    """By its first bytes, whatever it is called."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


class Hdf5Column:
    """A dataset of a file; a read that fails names the file, the field and the rows."""

    def __init__(self, path: Path, name: str, dataset: Any) -> None:
        self._path, self._name, self._dataset = path, name, dataset
        self.shape, self.dtype = tuple(dataset.shape), dataset.dtype

    def __getitem__(self, rows: slice) -> Any:
        try:
            return self._dataset[rows]
        except OSError as error:
            raise unreadable(self._path, error, f"{self._name}' from row '{rows.start or 0}") from error


def columns_of(path: Path, group: Any, prefix: str = "") -> Iterator[tuple[str, Hdf5Column]]:
    """All datasets below a group, with `/` between the words of their names."""
    for key, value in group.items():
        if hasattr(value, "items"):
            yield from columns_of(path, value, f"{prefix}{key}/")
        elif value.shape:
            yield f"{prefix}{key}", Hdf5Column(path, f"{prefix}{key}", value)

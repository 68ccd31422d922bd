"""A dataset folder: RL Lab's records, one file of raw rows a field, so that windows are read straight from the files.

`dataset.json` names the fields with shape and dtype, the number of records, and what the dataset says about itself. It
is written last: a folder without it is not a dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rl_lab.buffers.saving import field_file
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.records_layout import LAYOUT_VERSION, episodes_of_records, record_parts
from rl_lab.errors import DataError
from rl_lab.records import Fields, FieldSpec

DESCRIPTION = "dataset.json"


class RowsWriter:
    """Appends records to the files of a folder, in the dtypes of the first ones."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.records = folder, 0
        self.fields: dict[str, FieldSpec] = {}
        self._files: dict[str, BinaryIO] = {}

    def append(self, records: Fields) -> None:
        if not self.fields:
            self.fields = {name: FieldSpec(value.shape[1:], str(value.dtype)) for name, value in records.items()}
            self._files = {name: open(self._folder / field_file(name, "rows"), "wb") for name in records}  # noqa: SIM115
        for name, spec in self.fields.items():
            value = records.get(name)
            if value is None or value.shape[1:] != spec.shape:
                seen = "is missing" if value is None else f"has shape {value.shape[1:]}"
                raise DataError(f"Field '{name}' {seen} in some episode, and had shape {spec.shape} in the first.")
            rows = np.ascontiguousarray(value, spec.dtype)
            self._files[name].write(rows.reshape(-1).view(np.uint8).data)
        self.records += len(records["action"])

    def finish(self, attributes: Attributes) -> None:
        """Close the files and write the description: from now on the folder is a dataset."""
        self.close()
        fields = {name: {"shape": list(spec.shape), "dtype": spec.dtype} for name, spec in self.fields.items()}
        content = {"version": LAYOUT_VERSION, "records": self.records, "fields": fields, **attributes.to_dict()}
        (self._folder / DESCRIPTION).write_text(json.dumps(content, indent=1))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class FolderReader(Reader):
    """`fields` and `columns` give access to the rows in place."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        try:
            content = json.loads((path / DESCRIPTION).read_text())
            self.records = int(content.pop("records"))
            described = content.pop("fields")
            self.fields = {name: FieldSpec(tuple(spec["shape"]), spec["dtype"]) for name, spec in described.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(path / DESCRIPTION, error) from error
        content.pop("version", None)
        self.attributes = Attributes.from_dict(content)
        self._check_sizes()
        self._left_out: set[str] = set()

    def leave_out(self, names: Iterable[str]) -> None:
        """Read episodes without these fields: somebody reads them in place."""
        self._left_out = set(names)

    def file(self, name: str) -> Path:
        return self.path / field_file(name, "rows")

    def columns(self) -> dict[str, np.ndarray]:
        """The fields, mapped."""
        return {
            name: np.memmap(self.file(name), spec.dtype, "r", shape=(self.records, *spec.shape))
            for name, spec in self.fields.items()
            if name not in self._left_out
        }

    def episodes(self) -> Iterator[Episode]:
        yield from episodes_of_records(self.columns(), str(self.path))

    def _check_sizes(self) -> None:
        for name, spec in self.fields.items():
            row = prod(spec.shape) * np.dtype(spec.dtype).itemsize
            size = self.file(name).stat().st_size if self.file(name).is_file() else 0
            if size != row * self.records:
                raise DataError(
                    f"{self.file(name)}, field '{name}': the file ends in row {size // max(row, 1)} of {self.records}. "
                    "It is missing or was cut off."
                )


class Folder(Format):
    name, suffix = "folder", ""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / DESCRIPTION).is_file()

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> FolderReader:
        return FolderReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        writer = RowsWriter(path)
        try:
            for part in record_parts(episodes):
                writer.append(part)
            if not writer.records:
                raise DataError("There is no episode to write: the dataset is empty.")
            writer.finish(attributes)
        finally:
            writer.close()

"""PyTorch's .pt: a dict of tensors, or a list with one dict an episode. Loaded without executing code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.datasets.columns import Steps, recognise
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.records_layout import METADATA, episodes_of_records, joined_records, metadata_text
from rl_lab.errors import DataError


class PtReader(Reader):
    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds, for damaged files and for pickled objects
            raise unreadable(path, error) from error
        self._parts = content if isinstance(content, list) else [content]
        if not all(isinstance(part, Mapping) for part in self._parts):
            raise DataError(f"{path}: expected a dict of tensors, or a list of such dicts, one an episode.")
        metadata = self._parts[0].get(METADATA) if self._parts else None
        if metadata is not None:
            self.attributes = Attributes.from_dict(json.loads(metadata))

    def episodes(self) -> Iterator[Episode]:
        for number, part in enumerate(self._parts):
            place = str(self.path) if len(self._parts) == 1 else f"{self.path}, entry {number}"
            columns = _columns(part, place)
            if METADATA in part:
                yield from episodes_of_records(columns, place)
                continue
            roles = recognise(list(columns), self.options.mapping, place)
            self.notes = list(dict.fromkeys([*self.notes, *roles.notes]))
            yield from Steps(columns, roles, place).episodes(self.options.alignment_or("after"))


def _columns(part: Mapping[Any, Any], place: str, prefix: str = "") -> dict[str, np.ndarray]:
    """Tensors by name; those of nested dicts, and tuples as names (tensordict's), with dots between the words."""
    columns: dict[str, np.ndarray] = {}
    for key, value in part.items():
        words = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
        name = f"{prefix}{words}"
        if isinstance(value, Mapping):
            columns |= _columns(value, place, f"{name}.")
        elif isinstance(value, Tensor):
            columns[name] = value.numpy()
        elif name != METADATA:
            raise DataError(f"{place}, field '{name}': a {type(value).__name__}, expected a tensor.")
    return columns


class Pt(Format):
    name, suffix = "pt", ".pt"
    other_suffixes = (".pth",)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_file() and path.suffix in (cls.suffix, *cls.other_suffixes)

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return PtReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        records = {name: torch.from_numpy(value) for name, value in joined_records(episodes).items()}
        with open(path, "wb") as file:  # torch itself refuses some names, such as one that begins with a dot
            torch.save({METADATA: metadata_text(attributes), **records}, file)

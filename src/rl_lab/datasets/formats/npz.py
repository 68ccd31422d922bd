"""NumPy's .npz: RL Lab's records, or the columns of other programs; one file, or a folder with one file an episode."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.columns import Steps, recognise
from rl_lab.datasets.episode import Alignment, Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.records_layout import METADATA, episodes_of_records, joined_records, metadata_text
from rl_lab.errors import DataError


class NpzReader(Reader):
    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        metadata = _metadata(self._files[0])
        self._is_records = metadata is not None
        if metadata is not None:
            self.attributes = Attributes.from_dict(metadata)

    def episodes(self) -> Iterator[Episode]:
        for file in self._files:
            arrays = load_arrays(file)
            metadata = arrays.pop(METADATA, None)
            if metadata is not None:
                yield from episodes_of_records(arrays, str(file))
                continue
            roles = recognise(list(arrays), self.options.mapping, str(file))
            steps = Steps(arrays, roles, str(file))
            alignment = self.options.alignment_or(_recognised_alignment(steps))
            if alignment == "before" and self.options.alignment == "auto":
                self._note("the first action of every episode is zero: actions are those that led to their observation")
            for note in roles.notes:
                self._note(note)
            yield from steps.episodes(alignment)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _metadata(path: Path) -> dict | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            return json.loads(str(file[METADATA])) if METADATA in file.files else None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of a file. Object arrays are refused: reading them would execute what the file says."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                try:
                    arrays[name] = file[name]
                except ValueError as error:
                    if "pickle" in str(error):
                        raise DataError(
                            f"{path}, field '{name}': an object array: a pickle, which could run code. Save it as a "
                            "numeric array (np.stack for lists of equal shape), then try again."
                        ) from error
                    raise unreadable(path, error, name) from error
                except (zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
                    raise unreadable(path, error, name) from error
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise unreadable(path, error) from error
    return arrays


def _recognised_alignment(steps: Steps) -> Alignment:
    """Dreamer's files have `is_first`, and a zero action with each first observation: actions lead to theirs."""
    if "is_first" not in steps.roles.others or "is_last" not in steps.roles.others:
        return "after"
    actions = np.asarray(steps.columns[steps.roles.action][:])
    starts = np.append(0, steps.boundaries()[:-1])
    return "before" if actions.any() and not actions[starts].any() else "after"


class Npz(Format):
    name, suffix = "npz", ".npz"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".npz" or (path.is_dir() and any(path.glob("*.npz")))

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return NpzReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        with open(path, "wb") as file:
            arrays: dict[str, Any] = {METADATA: np.array(metadata_text(attributes)), **joined_records(episodes)}
            np.savez(file, **arrays)

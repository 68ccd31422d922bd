"""Diffusion Policy's zarr: arrays over all steps in `data/`, and the ends of the episodes in `meta/episode_ends`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.columns import UNNAMED, Steps, recognise
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.records_layout import METADATA
from rl_lab.errors import DataError
from rl_lab.records import OBSERVATION_PREFIX

ENDS, LAST = "episode_ends", "rl_lab_last"  # LAST: a group beside `data`, which other programs do not look at
CHUNK_BYTES = 8 << 20
NUMBERS = "biuf"  # kinds of NumPy's types


class ZarrReader(Reader):
    """Observations of other programs' files are usually to be named: mapping: {observation.camera: img, …}."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        import zarr

        try:
            group: Any = zarr.open_group(str(path), mode="r")
            self._group, self._data = group, group["data"]
            self._ends = np.asarray(_ZarrColumn(path, f"meta/{ENDS}", group[f"meta/{ENDS}"])[:])
        except DataError:
            raise
        except Exception as error:  # zarr and its codecs raise many kinds
            raise unreadable(path, error, f"meta/{ENDS}") from error
        metadata = group.attrs.get(METADATA)
        if metadata is not None:
            self.attributes = Attributes.from_dict(json.loads(metadata))

    def episodes(self) -> Iterator[Episode]:
        columns: dict[str, Any] = {name: _ZarrColumn(self.path, name, self._data[name]) for name in self._data}
        columns[ENDS] = self._ends
        roles = recognise(list(columns), self.options.mapping, str(self.path))
        self.notes = list(roles.notes)
        last = {}
        if LAST in self._group:
            group = self._group[LAST]
            last = {
                key: _ZarrColumn(self.path, f"{LAST}/{name}", group[name])
                for key, name in roles.observation.items()
                if name in group
            }
        steps = Steps(columns, roles, str(self.path), last)
        yield from steps.episodes(self.options.alignment_or("after"))


class _ZarrColumn:
    def __init__(self, path: Path, name: str, array: Any) -> None:
        if array.dtype.kind not in NUMBERS:
            raise DataError(
                f"{path}, field '{name}': {array.dtype} in place of numbers: objects may be pickles, which could run"
                " code. Save it as a numeric array."
            )
        self._path, self._name, self._array = path, name, array
        self.shape, self.dtype = tuple(array.shape), array.dtype

    def __getitem__(self, rows: slice) -> Any:
        try:
            return self._array[rows]
        except Exception as error:  # a chunk that is cut off: the codec's own error
            raise unreadable(self._path, error, f"{self._name}' from row '{rows.start or 0}") from error


class Zarr(Format):
    name, suffix, needs = "zarr", ".zarr", "zarr"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "meta" / ENDS).is_dir() and (path / "data").is_dir()

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return ZarrReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        """In zarr's second format, which every reader knows, with the last observations in a group of their own."""
        import zarr

        group: Any = zarr.open_group(str(path), mode="w", zarr_format=2)
        group.attrs[METADATA] = json.dumps(attributes.to_dict())
        ends: list[int] = []
        for given in episodes:
            episode = given.with_last_observation("auto")
            for key, value in episode.observation.items():
                name = "state" if list(episode.observation) == [UNNAMED] else OBSERVATION_PREFIX + key
                _append(group, f"data/{name}", value[:-1])
                _append(group, f"{LAST}/{name}", value[-1:])
            _append(group, "data/action", episode.action)
            if episode.reward is not None:
                _append(group, "data/reward", episode.reward)
            last = np.arange(episode.decisions) == episode.decisions - 1
            _append(group, "data/terminated", last & episode.terminated)
            ends.append((ends[-1] if ends else 0) + episode.decisions)
        if not ends:
            raise DataError("There is no episode to write: the dataset is empty.")
        _append(group, f"meta/{ENDS}", np.asarray(ends, np.int64))


def _append(group: Any, name: str, rows: np.ndarray) -> None:
    if name not in group:
        size = max(1, int(np.prod(rows.shape[1:], dtype=int)) * rows.itemsize)
        chunk = (max(1, min(4096, CHUNK_BYTES // size)), *rows.shape[1:])
        group.create_array(name, shape=(0, *rows.shape[1:]), dtype=rows.dtype, chunks=chunk)
    array = group[name]
    before = array.shape[0]
    array.resize((before + len(rows), *rows.shape[1:]))
    array[before:] = rows

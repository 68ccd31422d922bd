"""D4RL's HDF5: observations, actions, rewards, terminals and timeouts, flat over episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.columns import UNNAMED, Steps, recognise
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions
from rl_lab.datasets.formats.hdf5 import ENVIRONMENT, RECORDED_FROM, columns_of, is_hdf5, open_file
from rl_lab.errors import DataError


class D4rlReader(Reader):
    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._file = open_file(path)
        attributes = self._file.attrs
        self.attributes = Attributes(attributes.get(ENVIRONMENT), recorded_from=attributes.get(RECORDED_FROM))

    def episodes(self) -> Iterator[Episode]:
        columns: dict[str, Any] = {
            name: column
            for name, column in columns_of(self.path, self._file)
            if not name.startswith(("infos/", "metadata/"))
        }
        roles = recognise(list(columns), self.options.mapping, str(self.path))
        self.notes = list(roles.notes)
        yield from Steps(columns, roles, str(self.path)).episodes(self.options.alignment_or("after"))

    def close(self) -> None:
        self._file.close()


class D4rl(Format):
    name, suffix, needs = "hdf5", ".hdf5", "h5py"
    other_suffixes = (".h5",)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return is_hdf5(path) or path.suffix in (cls.suffix, *cls.other_suffixes)

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return D4rlReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        """With `next_observations`, so that the last one of each episode is kept."""
        with open_file(path, "w") as file:
            for name, value in ((ENVIRONMENT, attributes.environment), (RECORDED_FROM, attributes.recorded_from)):
                if value is not None:
                    file.attrs[name] = value
            empty = True
            for episode in episodes:
                empty = False
                for name, rows in _columns(episode.with_last_observation("auto")).items():
                    _append(file, name, rows)
            if empty:
                raise DataError("There is no episode to write: the dataset is empty.")


def _columns(episode: Episode) -> dict[str, np.ndarray]:
    plain = list(episode.observation) == [UNNAMED]
    columns = {}
    for key, value in episode.observation.items():
        columns["observations" if plain else f"observations/{key}"] = value[:-1]
        columns["next_observations" if plain else f"next_observations/{key}"] = value[1:]
    ends = np.arange(episode.decisions) == episode.decisions - 1
    columns |= {"terminals": ends & episode.terminated, "timeouts": ends & (not episode.terminated)}
    columns["actions"] = episode.action
    return columns if episode.reward is None else columns | {"rewards": episode.reward}


def _append(file: Any, name: str, rows: np.ndarray) -> None:
    if name not in file:
        file.create_dataset(name, (0, *rows.shape[1:]), rows.dtype, maxshape=(None, *rows.shape[1:]), chunks=True)
    before = len(file[name])
    file[name].resize(before + len(rows), 0)
    file[name][before:] = rows

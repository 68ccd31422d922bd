"""The replay of a run of RL Lab, from its latest checkpoint or from one that is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.saving import field_file
from rl_lab.datasets.columns import Column
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.records_layout import FLAGS, episodes_of_records
from rl_lab.errors import DataError
from rl_lab.reading import parse_yaml, read_text
from rl_lab.records import OBSERVATION_PREFIX

TRAINING_FILE = "training.pt"


class RunReader(Reader):
    """Streams of the replay in the order in which they were collected. The first episode of a stream may lack its
    beginning, where the ring had come round; the last one may be unfinished."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        checkpoint, self._run = _places(path)
        self._checkpoint = checkpoint
        config: Any = parse_yaml(read_text(self._run / "config.yaml"))
        self._observation = {str(key): spec for key, spec in config["_dims"]["observation"].items()}
        self._action = config["_dims"]["action"]
        self.attributes = Attributes(str(config["environment"]["id"]), "agent", str(path))
        try:
            sources = torch.load(checkpoint / TRAINING_FILE, map_location="cpu", weights_only=True)["sources"]
        except Exception as error:  # torch raises many kinds for a damaged file
            raise unreadable(checkpoint / TRAINING_FILE, error) from error
        replays = {name: state for name, state in sources.items() if "streams" in state}
        if not replays:
            raise DataError(f"{path}: the run keeps no replay (its data sources: {', '.join(sources) or 'none'}).")
        self._name = "replay" if "replay" in replays else next(iter(replays))
        self._state = replays[self._name]
        self.notes.append(f"records of data_sources.{self._name}, checkpoint {checkpoint.name}")

    def episodes(self) -> Iterator[Episode]:
        length, written = self._state["length"], self._state["streams"]["written"].numpy()
        held = np.minimum(written, length)
        on_disk = self._state["storage"] == "disk"
        starts = np.arange(len(held)) * length if on_disk else np.append(0, held.cumsum()[:-1])
        columns = {name: self._column(name, on_disk, len(held) * length) for name in self._fields()}
        for stream, count in enumerate(held.tolist()):
            turn = int(written[stream]) % length if written[stream] > length else 0
            rows = int(starts[stream])
            ordered = {name: _Turned(column, rows, count, turn) for name, column in columns.items()}
            yield from (episode for episode in episodes_of_records(ordered, str(self.path)) if episode.decisions)

    def _fields(self) -> list[str]:
        return [*(OBSERVATION_PREFIX + key for key in self._observation), "action", "reward", *FLAGS]

    def _column(self, name: str, on_disk: bool, rows: int) -> np.ndarray:
        try:
            if not on_disk:
                path = self._checkpoint / "sources" / self._name / field_file(name, "npy")
                return np.load(path, mmap_mode="r")
            path = self._run / "data" / self._name / field_file(name, "rows")
            shape, dtype = self._spec(name)
            return np.memmap(path, dtype, "r", shape=(rows, *shape))
        except (OSError, ValueError) as error:
            raise unreadable(path, error, name) from error

    def _spec(self, name: str) -> tuple[tuple[int, ...], str]:
        if name == "action":
            return tuple(self._action["shape"]), "float32" if self._action["kind"] == "continuous" else "int32"
        if name in FLAGS:
            return (), "bool"
        if name == "reward":
            return (), "float32"
        spec: Mapping[str, Any] = self._observation[name.removeprefix(OBSERVATION_PREFIX)]
        return tuple(spec["shape"]), str(spec["dtype"])


class _Turned:
    """Rows of one stream of a ring, oldest first."""

    def __init__(self, column: Column, start: int, count: int, turn: int) -> None:
        self._column, self._start, self._turn = column, start, turn
        self.shape, self.dtype = (count, *column.shape[1:]), column.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, stop, _ = rows.indices(self.shape[0])
        positions = (np.arange(first, stop) + self._turn) % self.shape[0] + self._start
        return np.asarray(self._column[positions])  # type: ignore[index]


def _places(path: Path) -> tuple[Path, Path]:
    """(checkpoint, run)"""
    if (path / TRAINING_FILE).is_file():
        return path.resolve(), path.resolve().parent.parent
    checkpoint = path / "checkpoints" / "latest"
    if not (checkpoint / TRAINING_FILE).is_file():
        raise DataError(f"{path}: the run has no checkpoint with its replay yet.")
    return checkpoint.resolve(), path.resolve()


class Run(Format):
    name, suffix = "run", ""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "config.yaml").is_file() or (path / TRAINING_FILE).is_file()

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return RunReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        raise DataError("A run cannot be written as a dataset: choose another --format.")

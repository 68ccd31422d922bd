"""LeRobot's datasets, versions 3.0 and 2.1: parquet tables with videos or pictures. The package is not needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.columns import Steps, recognise
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.lerobot_media import PictureColumn, VideoColumn, VideoPart
from rl_lab.datasets.formats.lerobot_writing import LAST_FILE, OWN, write_lerobot
from rl_lab.errors import DataError

INFO = "meta/info.json"
BOOKKEEPING = ("timestamp", "frame_index", "index", "task_index")


class LeRobotReader(Reader):
    """Rows are steps; no last observation is stored, except by RL Lab, in a file of its own."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._info = self._load_json(path / INFO)
        version = str(self._info.get("codebase_version", ""))
        if not version.startswith(("v3", "v2.1", "v2.0")):
            raise DataError(f"{path}: LeRobot {version or 'of an unknown version'}; 2.1 and 3.0 are read.")
        self._features: dict[str, Any] = self._info["features"]
        self._own: dict[str, Any] = self._info.get(OWN, {})
        self.attributes = Attributes.from_dict(self._own.get("attributes", {}))
        self._episodes = self._episode_table(version)
        self._number = 0

    def _load_json(self, file: Path) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(file.read_text())
            return content
        except (OSError, ValueError) as error:
            raise unreadable(file, error) from error

    def _episode_table(self, version: str) -> list[dict[str, Any]]:
        """One row for each episode: its length and the place of its videos."""
        if version.startswith("v3"):
            files = sorted((self.path / "meta" / "episodes").glob("*/*.parquet"))
            return [row for file in files for row in self._table(file).to_pylist()]
        file = self.path / "meta" / "episodes.jsonl"
        try:
            return [json.loads(line) for line in file.read_text().splitlines() if line]
        except (OSError, ValueError) as error:
            raise unreadable(file, error) from error

    def _table(self, file: Path) -> Any:
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(file)
        except Exception as error:  # pyarrow raises several kinds; a missing footer means that it was never finished
            raise unreadable(file, error) from error

    def episodes(self) -> Iterator[Episode]:
        self._number = 0
        last = self._table(self.path / LAST_FILE) if (self.path / LAST_FILE).is_file() else None
        files = sorted((self.path / "data").glob("*/*.parquet"))
        if not files:
            raise DataError(f"{self.path}: there is no file in data/.")
        for file in files:
            for episode in self._file_episodes(file, last):
                self._number += 1
                yield episode

    def _file_episodes(self, file: Path, last: Any) -> Iterator[Episode]:
        table = self._table(file)
        columns: dict[str, Any] = {
            name: self._column(name, table[name]) for name in table.column_names if name not in BOOKKEEPING
        }
        index = columns["episode_index"]
        for name, feature in self._features.items():
            if feature["dtype"] == "video":
                columns[name] = self._video(name, feature, index)
        roles = recognise(list(columns), self.options.mapping, str(file))
        names = self._own.get("keys", {})
        roles.observation = {names.get(name, key): name for key, name in roles.observation.items()}
        self.notes = list(dict.fromkeys([*self.notes, *roles.notes]))
        ends: dict[str, Any] = {}
        if last is not None:
            rows = slice(self._number, self._number + len(np.unique(index)))
            ends = {key: self._column(name, last[name])[rows] for key, name in roles.observation.items()}
        steps = Steps(columns, roles, str(file), ends)
        yield from steps.episodes(self.options.alignment_or("after"))

    def _column(self, name: str, column: Any) -> Any:
        feature = self._features.get(name, {})
        if feature.get("dtype") == "image":
            return PictureColumn(self.path, name, column, tuple(feature["shape"]))
        values = column.to_pylist()
        array = np.asarray(values, dtype=feature.get("dtype") if feature.get("dtype") != "video" else None)
        shape = self._own.get("shapes", {}).get(name)
        if shape is None:
            shape = feature.get("shape", []) if len(feature.get("shape", [])) > 1 else list(array.shape[1:])
        return array.reshape(len(array), *shape)

    def _video(self, name: str, feature: dict[str, Any], index: np.ndarray) -> VideoColumn:
        """The frames of the episodes that a data file holds."""
        parts, row = [], 0
        fps = float(self._info["fps"])
        for number in np.unique(index).tolist():
            entry = self._episodes[number]
            length = int(entry["length"])
            place = {"video_key": name, "episode_index": number, "episode_chunk": number // self._info["chunks_size"]}
            place |= {part: entry.get(f"videos/{name}/{part}", 0) for part in ("chunk_index", "file_index")}
            path = self.path / self._info["video_path"].format(**place)
            start = round(float(entry.get(f"videos/{name}/from_timestamp", 0.0)) * fps)
            parts.append(VideoPart(row, row + length, path, start))
            row += length
        return VideoColumn(parts, tuple(feature["shape"]))


class LeRobot(Format):
    name, suffix, needs = "lerobot", "", "pyarrow"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / INFO).is_file()

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return LeRobotReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        write_lerobot(path, episodes, attributes)

"""robomimic's HDF5: one group a demonstration, with observations by key and the following ones beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions
from rl_lab.datasets.formats.hdf5 import RECORDED_FROM, Hdf5Column, is_hdf5, open_file
from rl_lab.errors import DataError

DATA, DEMONSTRATION = "data", "demo_"


class RobomimicReader(Reader):
    """`dones` are successes: such a demonstration terminated."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._file = open_file(path)
        self._data = self._file[DATA]
        arguments = json.loads(self._data.attrs.get("env_args", "{}"))
        self.attributes = Attributes(arguments.get("env_name"), recorded_from=self._data.attrs.get(RECORDED_FROM))

    def episodes(self) -> Iterator[Episode]:
        names = [name for name in self._data if name.startswith(DEMONSTRATION)]
        for name in sorted(names, key=lambda text: int(text.removeprefix(DEMONSTRATION))):
            yield self._episode(name)

    def _episode(self, name: str) -> Episode:
        group = self._data[name]
        for field in ("obs", "actions"):
            if field not in group:
                raise DataError(f"{self.path}, {name}: the field '{field}' is missing.")
        action = self._read(group, "actions", name)
        observation = {key: self._read(group["obs"], key, name) for key in group["obs"]}
        for key in group.get("next_obs", ()):
            following = Hdf5Column(self.path, f"{name}/next_obs/{key}", group["next_obs"][key])
            if key in observation and len(observation[key]) == len(action):
                observation[key] = np.concatenate([observation[key], following[slice(len(action) - 1, None)]])
        reward = self._read(group, "rewards", name).astype(np.float32) if "rewards" in group else None
        done = bool(self._read(group, "dones", name)[-1]) if "dones" in group and len(action) else False
        return Episode(observation, action, reward, done)

    def _read(self, group: Any, field: str, name: str) -> np.ndarray:
        return np.asarray(Hdf5Column(self.path, f"{name}/{field}", group[field])[slice(None)])

    def close(self) -> None:
        self._file.close()


class Robomimic(Format):
    name, suffix, needs = "robomimic", ".hdf5", "h5py"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not is_hdf5(path):
            return False
        cls.require()
        with open_file(path) as file:
            return DATA in file and any(name.startswith(DEMONSTRATION) for name in file[DATA])

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return RobomimicReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        with open_file(path, "w") as file:
            data, total = file.create_group(DATA), 0
            data.attrs["env_args"] = json.dumps({"env_name": attributes.environment, "type": 2, "env_kwargs": {}})
            if attributes.recorded_from is not None:
                data.attrs[RECORDED_FROM] = attributes.recorded_from
            for number, given in enumerate(episodes):
                episode = given.with_last_observation("auto")
                group = data.create_group(f"{DEMONSTRATION}{number}")
                group.attrs["num_samples"] = episode.decisions
                for key, value in episode.observation.items():
                    group[f"obs/{key}"], group[f"next_obs/{key}"] = value[:-1], value[1:]
                group["actions"] = episode.action
                if episode.reward is not None:
                    group["rewards"] = episode.reward
                ends = np.arange(episode.decisions) == episode.decisions - 1
                group["dones"] = (ends & episode.terminated).astype(np.int64)
                total += episode.decisions
            data.attrs["total"] = total
            if not total:
                raise DataError("There is no episode to write: the dataset is empty.")

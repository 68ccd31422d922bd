"""Minari's datasets: a folder with metadata.json and main_data.hdf5, read and written without the package."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_lab.datasets.columns import UNNAMED
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.formats.base import Format, Reader, ReadOptions, unreadable
from rl_lab.datasets.formats.hdf5 import RECORDED_FROM, Hdf5Column, columns_of, open_file
from rl_lab.errors import DataError

MAIN, METADATA = "main_data.hdf5", "metadata.json"
VERSION = "0.5.0"  # of the layout that is written


def data_folder(path: Path) -> Path:
    """A dataset's folder has the files in `data/`; that folder itself will do as well."""
    return path / "data" if (path / "data" / METADATA).is_file() else path


class MinariReader(Reader):
    """T + 1 observations an episode, or T in some early datasets. Images are JPEGs unless `jpeg_encoding` is false."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        folder = data_folder(path)
        try:
            metadata = json.loads((folder / METADATA).read_text())
        except (OSError, ValueError) as error:
            raise unreadable(folder / METADATA, error) from error
        if metadata.get("data_format", "hdf5") != "hdf5":
            raise DataError(f"{path}: its data_format is {metadata['data_format']}; only hdf5 is read.")
        spec = json.loads(metadata["env_spec"]) if metadata.get("env_spec") else {}
        self.attributes = Attributes(
            spec.get("id"), recorded_from=metadata.get(RECORDED_FROM) or metadata.get("dataset_id")
        )
        self._file, self._path = open_file(folder / MAIN), folder / MAIN

    def episodes(self) -> Iterator[Episode]:
        for name in sorted(self._file, key=lambda text: int(text.removeprefix("episode_"))):
            group = self._file[name]
            missing = [field for field in ("observations", "actions") if field not in group]
            if missing:
                raise DataError(f"{self._path}, {name}: the field '{missing[0]}' is missing.")
            observation = self._observation(group["observations"], name)
            action = self._single(group["actions"], f"{name}/actions")
            reward = np.asarray(self._single(group["rewards"], f"{name}/rewards"), np.float32)
            ended = bool(group["terminations"][-1]) if "terminations" in group and len(action) else False
            seed = group.attrs.get("seed")
            yield Episode(observation, action, reward, ended, None if seed is None else int(seed))

    def _observation(self, node: Any, name: str) -> dict[str, np.ndarray]:
        if not hasattr(node, "items"):
            return {UNNAMED: self._values(Hdf5Column(self._path, f"{name}/observations", node))}
        columns = columns_of(self._path, node)
        return {key.replace("/", "_").replace("_index_", ""): self._values(column) for key, column in columns}

    def _single(self, node: Any, name: str) -> np.ndarray:
        if hasattr(node, "items"):
            raise DataError(f"{self._path}, {name}: a Dict or Tuple of actions; expected a plain space.")
        return self._values(Hdf5Column(self._path, name, node))

    def _values(self, column: Hdf5Column) -> np.ndarray:
        values = column[slice(None)]
        if not _are_jpegs(values):
            return np.asarray(values)
        from PIL import Image

        self.notes = ["images were stored as JPEGs: not what the environment showed, bit for bit"]
        return np.stack([np.asarray(Image.open(io.BytesIO(bytes(image)))) for image in values])

    def close(self) -> None:
        self._file.close()


def _are_jpegs(values: np.ndarray) -> bool:
    """Rows of bytes, of different lengths or by chance of one, that begin as a JPEG does."""
    is_bytes = values.dtype == object or (values.dtype == np.uint8 and values.ndim == 2)
    return is_bytes and len(values) > 0 and bytes(values[0][:2]) == b"\xff\xd8"


class Minari(Format):
    name, suffix, needs = "minari", "", "h5py"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_dir() and (data_folder(path) / METADATA).is_file() and (data_folder(path) / MAIN).is_file()

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> Reader:
        return MinariReader(path, options)

    @classmethod
    def write(cls, path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
        """Images stay as they are: `jpeg_encoding` is false."""
        folder = path / "data"
        folder.mkdir(parents=True)
        steps, count, first = 0, 0, None
        with open_file(folder / MAIN, "w") as file:
            for count, given in enumerate(episodes, 1):
                episode = given.with_last_observation("auto")
                first = first or episode
                if episode.reward is None:
                    raise DataError("Minari's datasets have rewards, and these episodes have none. Use another format.")
                _write_episode(file.create_group(f"episode_{count - 1}"), episode, count - 1)
                steps += episode.decisions
        if first is None:
            raise DataError("There is no episode to write: the dataset is empty.")
        metadata = _metadata(first, attributes) | {"total_episodes": count, "total_steps": steps}
        (folder / METADATA).write_text(json.dumps(metadata))


def _write_episode(group: Any, episode: Episode, number: int) -> None:
    group.attrs["id"], group.attrs["total_steps"] = number, episode.decisions
    if episode.seed is not None:
        group.attrs["seed"] = episode.seed
    if list(episode.observation) == [UNNAMED]:
        group["observations"] = episode.observation[UNNAMED]
    else:
        for key, value in episode.observation.items():
            group[f"observations/{key}"] = value
    ends = np.arange(episode.decisions) == episode.decisions - 1
    group["actions"], group["rewards"] = episode.action, episode.reward
    group["terminations"], group["truncations"] = ends & episode.terminated, ends & (not episode.terminated)


def _metadata(episode: Episode, attributes: Attributes) -> dict[str, Any]:
    observation: Any = {key: _box(value) for key, value in episode.observation.items()}
    observation = observation[UNNAMED] if list(observation) == [UNNAMED] else {"type": "Dict", "subspaces": observation}
    name = (attributes.environment or "unknown").replace("/", "-").lower().rpartition("-v")[0] or "unknown"
    metadata = {
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "dataset_id": f"{name}/recorded-v0",
        "minari_version": VERSION,
        "observation_space": json.dumps(observation),
        "action_space": json.dumps(_box(episode.action)),
        RECORDED_FROM: attributes.recorded_from,
    }
    spec = gymnasium.registry.get(attributes.environment or "")
    if spec is not None:
        metadata["env_spec"] = spec.to_json()
    elif attributes.environment is not None:
        metadata["env_spec"] = json.dumps({"id": attributes.environment})
    return metadata


def _box(values: np.ndarray) -> dict[str, Any]:
    """A space that holds the values: the bounds of an integer's type, or none."""
    shape, dtype = list(values.shape[1:]), values.dtype
    whole = np.issubdtype(dtype, np.integer)
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if whole else (-np.inf, np.inf)
    bounds = {"low": np.full(shape, low).tolist(), "high": np.full(shape, high).tolist()}
    return {"type": "Box", "dtype": str(dtype), "shape": shape, **bounds}

"""Writing LeRobot's version 3.0: one table of steps, pictures as PNGs in it, and what its own readers look for."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.statistics import FieldStatistics, StatisticsCollector
from rl_lab.errors import DataError

OWN = "rl_lab"  # in info.json: names and shapes as they were, which LeRobot's own do not keep
LAST_FILE = Path("meta") / "rl_lab_last.parquet"  # the observation after each episode's last action
DATA_FILE, EPISODES_FILE = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
FPS = 10
ARROW_TYPES = {"float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"}


def write_lerobot(path: Path, episodes: Iterable[Episode], attributes: Attributes) -> None:
    """All rows go through memory once, one episode at a time, into one file of row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for folder in (DATA_FILE, EPISODES_FILE):
        (path / folder).parent.mkdir(parents=True, exist_ok=True)
    writer, lasts, table, total = None, [], [], 0
    features: dict[str, Any] = {}
    own: dict[str, Any] = {"attributes": attributes.to_dict(), "keys": {}, "shapes": {}}
    collector = StatisticsCollector()
    for number, given in enumerate(episodes):
        episode = given.with_last_observation("auto")
        columns = _columns(episode, own)
        features = features or {name: _feature(value) for name, value in columns.items()}
        count = episode.decisions
        collector.add({**columns, "is_last": np.zeros(count, bool)})
        rows = {name: _arrow(value, pa) for name, value in columns.items()}
        rows |= _bookkeeping(number, count, total, pa)
        part = pa.table(rows)
        writer = writer or pq.ParquetWriter(path / DATA_FILE, part.schema)
        writer.write_table(part)
        lasts.append({_name(key, value): value[-1:] for key, value in episode.observation.items()})
        table.append(_episode_row(number, count, total))
        total += count
    if writer is None:
        raise DataError("There is no episode to write: the dataset is empty.")
    writer.close()
    joined = {name: np.concatenate([last[name] for last in lasts]) for name in lasts[0]}
    pq.write_table(pa.table({name: _arrow(value, pa) for name, value in joined.items()}), path / LAST_FILE)
    pq.write_table(pa.Table.from_pylist(table), path / EPISODES_FILE)
    pq.write_table(pa.table({"task": ["recorded"], "task_index": [0]}), path / "meta" / "tasks.parquet")
    _write_meta(path, features, own, collector, episodes=len(table), frames=total)


def _name(key: str, value: np.ndarray) -> str:
    return f"observation.images.{key}" if value.dtype == np.uint8 and value.ndim == 4 else f"observation.{key}"


def _columns(episode: Episode, own: dict[str, Any]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for key, value in episode.observation.items():
        name = _name(key, value)
        columns[name], own["keys"][name] = value[:-1], key
    columns["action"] = episode.action
    if episode.reward is not None:
        columns["next.reward"] = episode.reward
    ends = np.arange(episode.decisions) == episode.decisions - 1
    columns["next.done"], columns["next.terminated"] = ends, ends & episode.terminated
    columns["next.truncated"] = ends & (not episode.terminated)
    own["shapes"] |= {name: list(value.shape[1:]) for name, value in columns.items() if value.dtype != np.uint8}
    return columns


def _feature(value: np.ndarray) -> dict[str, Any]:
    if value.dtype == np.uint8 and value.ndim == 4:
        return {"dtype": "image", "shape": list(value.shape[1:]), "names": ["height", "width", "channels"]}
    if str(value.dtype) not in ARROW_TYPES:
        raise DataError(f"LeRobot's tables hold no {value.dtype}: convert the field, or use another format.")
    return {"dtype": str(value.dtype), "shape": list(value.shape[1:]) or [1], "names": None}


def _arrow(value: np.ndarray, pa: Any) -> Any:
    if value.dtype == np.uint8 and value.ndim == 4:
        pictures = [{"bytes": _png(image), "path": None} for image in value]
        return pa.array(pictures, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if value.ndim == 1:
        return pa.array(value)
    flat = value.reshape(len(value), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, "PNG")
    return buffer.getvalue()


def _bookkeeping(number: int, count: int, start: int, pa: Any) -> dict[str, Any]:
    frame = np.arange(count)
    return {
        "timestamp": pa.array((frame / FPS).astype(np.float32)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(np.full(count, number)),
        "index": pa.array(start + frame),
        "task_index": pa.array(np.zeros(count, np.int64)),
    }


def _episode_row(number: int, count: int, start: int) -> dict[str, Any]:
    return {
        "episode_index": number, "length": count, "tasks": ["recorded"], "data/chunk_index": 0, "data/file_index": 0,
        "dataset_from_index": start, "dataset_to_index": start + count,
        "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0,
    }  # fmt: skip


def _write_meta(
    path: Path, features: dict[str, Any], own: dict[str, Any], collector: StatisticsCollector, *, episodes: int,
    frames: int,
) -> None:  # fmt: skip
    defaults = {
        "timestamp": "float32",
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
    }
    for name, dtype in defaults.items():
        features[name] = {"dtype": dtype, "shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0", "robot_type": None, "fps": FPS, "features": features, "total_episodes": episodes,
        "total_frames": frames, "total_tasks": 1, "chunks_size": 1000, "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200, "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4", OWN: own,
    }  # fmt: skip
    (path / "meta" / "info.json").write_text(json.dumps(info, indent=1))
    statistics = {name: _statistics(entry) for name, entry in collector.result().items()}
    (path / "meta" / "stats.json").write_text(json.dumps(statistics))


def _statistics(entry: FieldStatistics) -> dict[str, list[float]]:
    named = {"min": entry.low, "max": entry.high, "mean": entry.mean, "std": entry.std}
    return {name: np.atleast_1d(value).tolist() for name, value in named.items()} | {"count": [entry.count]}

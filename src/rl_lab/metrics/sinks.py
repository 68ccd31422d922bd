"""Dashboards that follow a run: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_lab.errors import ConfigError
from rl_lab.metrics.video import encode_gif, prepare_frames


class Sink(Protocol):
    """The interface of a dashboard. `step` is the x axis: env steps (updates in a run without an environment)."""

    name: str

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Finite values of one log time."""

    def video(self, name: str, path: Path, frames: np.ndarray, step: int, fps: float) -> None:
        """Frames [time, height, width, 3]; `path` is the file that holds them already."""

    def resume(self, purge_step: int) -> None:
        """The run goes on from an earlier moment: forget what was written at `purge_step` and later."""

    def close(self) -> None: ...


class TensorBoardSink:
    """Writes event files; opened with the first value, so that a resumed run can purge first."""

    name = "TensorBoard"

    def __init__(self, *, folder: Path) -> None:
        self._folder = folder
        self._purge_step: int | None = None
        self._writer: Any = None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        items = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=items))

    def video(self, name: str, path: Path, frames: np.ndarray, step: int, fps: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        frames = prepare_frames(frames)
        # TensorBoard plays GIFs in its image panel. At most 150 frames: a GIF is large.
        stride = -(-len(frames) // 150)
        height, width = frames.shape[1:3]
        encoded = encode_gif(frames[::stride], fps / stride)
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
        self._add(step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))

    def resume(self, purge_step: int) -> None:
        self.close()
        self._purge_step = purge_step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
            if self._purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=self._purge_step, session_log=start))
                self._purge_step = None
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


class WandbSink:
    """Weights & Biases. A resumed run goes on under the same id; W&B drops the rows that it has already."""

    name = "Weights & Biases"

    def __init__(self, *, folder: Path, config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """`arguments` are those of `wandb.init` (project, entity, group, mode, tags, …)."""
        try:
            import wandb
        except ImportError as error:
            raise missing_extra("logging.wandb", "wandb") from error
        self._wandb: Any = wandb
        label = run_label(folder)
        defaults: dict[str, Any] = {
            "project": "rl-lab",
            "group": folder.parent.name,
            "name": label,
            "id": label.replace("/", "-"),
            "dir": str(folder),
            "config": dict(config or {}),
            "resume": "allow",
        }
        self._run: Any = wandb.init(**{**defaults, **arguments})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def video(self, name: str, path: Path, frames: np.ndarray, step: int, fps: float) -> None:
        self._run.log({name: self._wandb.Video(str(path), format=path.suffix.lstrip("."))}, step=step)

    def resume(self, purge_step: int) -> None:
        """Nothing to purge: repeated rows are the same rows, and W&B ignores steps that lie behind its last one."""

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow. The MLflow run's id is kept in the run directory, so that a resumed run goes on in it."""

    name = "MLflow"

    def __init__(
        self,
        *,
        folder: Path,
        experiment: str = "rl-lab",
        tracking_uri: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_extra("logging.mlflow", "mlflow") from error
        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        marker = folder / "mlflow_run_id.txt"
        if marker.exists():
            self._id = marker.read_text().strip()
            return
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        self._id = self._client.create_run(experiment_id, run_name=run_label(folder)).info.run_id
        marker.write_text(self._id + "\n")
        for key, value in flatten(config or {}).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):  # the most that MLflow takes in one call
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def video(self, name: str, path: Path, frames: np.ndarray, step: int, fps: float) -> None:
        self._client.log_artifact(self._id, str(path), artifact_path="videos")

    def resume(self, purge_step: int) -> None:
        """MLflow cannot forget a value; the rows written again are the same ones, at the same steps."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


def missing_extra(key: str, extra: str) -> ConfigError:
    """The error of an optional dashboard that is not installed."""
    return ConfigError(
        f"{key} is on, but the package '{extra}' is not installed. "
        f"Install it with: pip install 'rl-lab[{extra}]', or switch it off with {key}=false."
    )


def run_label(folder: Path) -> str:
    """experiment/run, as the run directory is called."""
    return f"{folder.parent.name}/{folder.name}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} as {'a.b': 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _mlflow_name(name: str) -> str:
    """MLflow allows letters, digits, and _ - . space / in a metric's name."""
    return "".join(character if character.isalnum() or character in "_-. /" else "_" for character in name)

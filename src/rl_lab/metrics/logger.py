"""metrics.jsonl: one row a log time, exact to the last bit, repaired and cut back when a run goes on."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.video import write_video

ROW_HEAD = ("env_steps", "updates", "wall_s", "phase")
_log = logging.getLogger(__name__)


class MetricsLogger:
    """Writes rows to metrics.jsonl and passes them to the sinks (TensorBoard, W&B, MLflow).

    The file is the record of the run; a sink is a convenience, so one that fails is dropped with a warning.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = Path(path)
        self._sinks = list(sinks)
        self._pending: dict[str, float] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115 - open for the life of the run
        self._cut(self._file.seek(0, os.SEEK_END))

    def scalar(self, name: str, value: float) -> None:
        """A value that goes into the next row."""
        self._pending[name] = float(value)

    def log(self, *, env_steps: int, updates: int, wall_s: float, phase: str, values: Mapping[str, float]) -> None:
        """Write one row. Keys come in one order, floats with all their digits, NaN and infinities as null."""
        metrics = {**self._pending, **values}
        self._pending = {}
        self._file.write(format_row(env_steps=env_steps, updates=updates, wall_s=wall_s, phase=phase, values=metrics))
        self._file.flush()
        finite = {name: float(metrics[name]) for name in sorted(metrics) if math.isfinite(metrics[name])}
        step = sink_step(env_steps, updates)
        self._each_sink(lambda sink: sink.scalars(finite, step))

    def video(self, name: str, frames: np.ndarray, env_steps: int, *, fps: float = 30.0) -> Path:
        """Write frames [time, height, width, 3] to videos/<name>-<env_steps>.mp4 beside metrics.jsonl."""
        target = self.path.parent / "videos" / f"{name.replace('/', '-')}-{env_steps:010d}.mp4"
        path = write_video(target, frames, fps)
        self._each_sink(lambda sink: sink.video(name, path, frames, env_steps, fps))
        return path

    def position(self) -> int:
        """Where the file ends now, safely on disk: a checkpoint stores this."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def truncate(self, position: int) -> int:
        """Forget every row written after `position`, and a row that was torn by a kill.

        Returns where the file ends now: less than `position` only where rows were lost or deleted.
        """
        self._pending = {}
        end = self._cut(position)
        last = self._last_row(end)
        purge = sink_step(last["env_steps"], last["updates"]) + 1 if last else 0
        self._each_sink(lambda sink: sink.resume(purge))
        return end

    def close(self) -> None:
        self._each_sink(lambda sink: sink.close())
        self._sinks = []
        if not self._file.closed:
            self._file.flush()
            self._file.close()

    def _cut(self, position: int) -> int:
        """Cut the file at `position`, or at the end of the last whole line before it."""
        self._file.flush()
        end = _last_line_end(self._file, min(position, self._file.seek(0, os.SEEK_END)))
        self._file.truncate(end)
        self._file.seek(end)
        return end

    def _last_row(self, end: int) -> dict[str, Any] | None:
        if end == 0:
            return None
        start = _last_line_end(self._file, end - 1)
        self._file.seek(start)
        row = self._file.read(end - start)
        self._file.seek(0, os.SEEK_END)
        try:
            parsed = json.loads(row)
            return {name: int(parsed[name]) for name in ("env_steps", "updates")}
        except (ValueError, KeyError, TypeError):
            return None

    def _each_sink(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # a dashboard must not end a run
                self._sinks.remove(sink)
                _log.warning("%s stopped: %s. The run goes on; metrics.jsonl has everything.", sink.name, error)


def sink_step(env_steps: int, updates: int) -> int:
    """The x axis of dashboards: env steps, or updates in a run that has no environment."""
    return env_steps if env_steps > 0 else updates


def format_row(*, env_steps: int, updates: int, wall_s: float, phase: str, values: Mapping[str, float]) -> bytes:
    """One line of metrics.jsonl."""
    row: dict[str, Any] = {"env_steps": env_steps, "updates": updates, "wall_s": round(wall_s, 3), "phase": phase}
    for name in sorted(values):
        if name in row:
            raise ValueError(f"A metric may not be called '{name}': that is a column of every row. Give it a prefix.")
        row[name] = _number(values[name])
    return json.dumps(row, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _number(value: Any) -> int | float | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _last_line_end(file: Any, end: int) -> int:
    """The offset just behind the last newline in the first `end` bytes."""
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return int(start + newline + 1)
        end = start
    return 0

"""metrics.jsonl: one row a log time, exact to the last bit, repaired and cut back when a run goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.sinks import Sink
from rl_lab.metrics.video import write_video

DAMAGED = "metrics.damaged.jsonl"
ROW_HEAD = ("env_steps", "updates", "wall_s", "phase")
_log = logging.getLogger(__name__)


class MetricsLogger:
    """Writes rows to metrics.jsonl and passes them to the sinks (TensorBoard, W&B, MLflow).

    The file is the record of the run; a sink is a convenience, so one that fails is dropped with a warning. `checksum`
    is the CRC-32 of the rows so far: a checkpoint stores it beside the position.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self.path = Path(path)
        self._sinks = list(sinks)
        self._pending: dict[str, float] = {}
        self.checksum = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115 - open for the life of the run
        size = self._file.seek(0, os.SEEK_END)
        end = _last_line_end(self._file, size)
        self._torn = self._read(end, size)  # what a kill left of a row
        self._cut(size)

    def scalar(self, name: str, value: float) -> None:
        """A value that goes into the next row."""
        self._pending[name] = float(value)

    def log(self, *, env_steps: int, updates: int, wall_s: float, phase: str, values: Mapping[str, float]) -> None:
        """Write one row. Keys come in one order, floats with all their digits, NaN and infinities as null."""
        metrics = {**self._pending, **values}
        self._pending = {}
        row = format_row(env_steps=env_steps, updates=updates, wall_s=wall_s, phase=phase, values=metrics)
        self._file.write(row)
        self._file.flush()
        self.checksum = zlib.crc32(row, self.checksum)
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
        """The file's length now, safely on disk: a checkpoint stores this."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def truncate(self, position: int, checksum: int | None = None) -> str | None:
        """Forget every row written after `position`, and a row that was torn by a kill.

        Returns a sentence where the rows before are not those that `checksum` was taken of, or are fewer. The file is
        then kept as metrics.damaged.jsonl, and the rows that can still be read go on.
        """
        self._pending = {}
        damage = self._damage(position, checksum)
        if damage is not None:
            self._salvage(position)
        end = self._cut(position)
        last = self._last_row(end)
        purge = sink_step(last["env_steps"], last["updates"]) + 1 if last else 0
        self._each_sink(lambda sink: sink.resume(purge))
        return damage

    def _damage(self, position: int, checksum: int | None) -> str | None:
        size = self._file.seek(0, os.SEEK_END)
        if size < position:
            return f"{self.path.name} has {size} bytes where the checkpoint saw {position}: rows are missing"
        if checksum is not None and zlib.crc32(self._read(0, position)) != checksum:
            return f"{self.path.name} is not as the run wrote it: its checksum differs from the checkpoint's"
        return None

    def _salvage(self, position: int) -> None:
        """Keep a copy of the damaged file, and of its rows up to `position` those that are whole."""
        content = self._read(0, self._file.seek(0, os.SEEK_END))
        self.path.with_name(DAMAGED).write_bytes(content + self._torn)
        rows = [line + b"\n" for line in content[:position].split(b"\n") if _is_row(line)]
        self._file.truncate(0)
        self._file.write(b"".join(rows))

    def _read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        content: bytes = self._file.read(end - start)
        return content

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
        self.checksum = zlib.crc32(self._read(0, end))
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


class NoRows(MetricsLogger):
    """The log of a rank that writes nothing: its values stand in the first rank's rows."""

    def __init__(self) -> None:
        self._sinks, self._pending, self.checksum = [], {}, 0

    def log(self, *, env_steps: int, updates: int, wall_s: float, phase: str, values: Mapping[str, float]) -> None:
        self._pending = {}

    def position(self) -> int:
        return 0

    def truncate(self, position: int, checksum: int | None = None) -> str | None:
        return None

    def close(self) -> None:
        pass


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


def _is_row(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and all(name in row for name in ROW_HEAD)


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

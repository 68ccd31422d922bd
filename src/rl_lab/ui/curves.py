"""metrics.jsonl of runs that are being looked at, read on as it grows, and handed out as columns."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.run_files import number
from rl_lab.reading import open_file, parse_object

KEPT_RUNS = 12  # tails that are held at a time
FULL_ROWS = 3000  # from this many rows on, the first answer holds means of neighbouring rows

Columns = dict[str, list[Any]]


class MetricsTail:
    """The rows of one metrics.jsonl. A file that was cut back (a run that went on from a checkpoint) is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0  # how often it was read from its start
        self.rows: list[dict[str, Any]] = []
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def read_on(self) -> None:
        """Take the lines that were completed since the last call; a torn last line waits, a broken one is left out."""
        with self._lock:
            try:
                with open_file(self.path) as file:
                    status = os.fstat(file.fileno())
                    file_id = (status.st_dev, status.st_ino)
                    if file_id != self._file_id or status.st_size < self._offset:
                        self._file_id, self._offset, self.rows = file_id, 0, []
                        self.epoch += 1
                    file.seek(self._offset)
                    text = file.read()
            except OSError:
                return
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                value = parse_object(line)
                if value is not None:
                    self.rows.append(value)

    def since(self, epoch: int, count: int) -> dict[str, Any]:
        """The columns of the rows after the first `count` of this `epoch`, or of all rows where that is over."""
        self.read_on()
        start = count if epoch == self.epoch and 0 <= count <= len(self.rows) else 0
        rows = self.rows[start:]
        columns = thinned(rows, FULL_ROWS) if len(rows) > FULL_ROWS else columns_of(rows)
        return {"epoch": self.epoch, "start": start, "count": len(self.rows), "columns": columns}


class CurveReader:
    """Tails by run directory; the ones that were not asked for the longest time are forgotten."""

    def __init__(self) -> None:
        self._tails: OrderedDict[Path, MetricsTail] = OrderedDict()
        self._lock = threading.Lock()

    def tail(self, folder: Path) -> MetricsTail:
        path = folder / "metrics.jsonl"
        with self._lock:
            tail = self._tails.pop(path, None) or MetricsTail(path)
            self._tails[path] = tail
            while len(self._tails) > KEPT_RUNS:
                self._tails.popitem(last=False)
        return tail


def columns_of(rows: list[dict[str, Any]]) -> Columns:
    """Every metric as a list over the rows, null where a row has no finite value; phases as strings."""
    names = {name for row in rows for name in row if name != "phase"}
    columns: Columns = {name: [number(row.get(name)) for row in rows] for name in sorted(names)}
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    columns["phase"] = [str(row.get("phase") or "") for row in rows]
    return columns


def thinned(rows: list[dict[str, Any]], limit: int) -> Columns:
    """The same with at most `limit` rows, each the mean of a stretch of neighbours."""
    edges = np.linspace(0, len(rows), limit + 1).astype(int)
    full = columns_of(rows)
    phases = full.pop("phase")
    columns: Columns = {}
    for name, values in full.items():
        array = np.array([np.nan if value is None else value for value in values], np.float64)
        known = np.isfinite(array)
        sums = np.add.reduceat(np.where(known, array, 0.0), edges[:-1])
        counts = np.add.reduceat(known.astype(int), edges[:-1])
        columns[name] = [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
    columns["phase"] = [phases[edge] for edge in edges[:-1]]
    return columns

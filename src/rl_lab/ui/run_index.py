"""The runs below a folder as rows of a table, read from their small files and kept until those files change."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_lab.errors import RunNotFoundError
from rl_lab.metrics.run_files import EVAL_RETURN, TRAIN_RETURNS, number
from rl_lab.orchestration.files import read_json
from rl_lab.orchestration.run_directory import RUN_FILE, RunDirectory
from rl_lab.reading import open_file, parse_object, read_text
from rl_lab.ui.writer import is_being_written

TAIL_BYTES = 128 << 10  # of metrics.jsonl: far more than the rows that hold the newest returns
RECENT_ROWS = 8  # that speed is measured over
DEPTH = 3  # folders between the root and a run: <experiment>/<run>, or <sweep>/<experiment>/<run>
WATCHED = (RUN_FILE, "metrics.jsonl", "summary.json", "lock.json", "config.yaml")

Row = dict[str, Any]
Signature = tuple[tuple[int, int], ...]


@dataclass
class _Entry:
    """A run that was seen: its files' sizes and times when it was read, and the row made of them."""

    folder: Path
    signature: Signature
    row: Row
    version: int  # of the index when the row last changed


@dataclass
class Changes:
    """Rows that changed after a version of the index, and the runs that are gone."""

    version: int
    rows: list[Row] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


class RunIndex:
    """Finds run directories below `root` and reads each again only after one of its files has changed.

    A run is known by its path below the root. Folders that lead out of the root through a link are not runs of it.
    `reads` counts the runs that were read, for tests.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        self.reads = 0
        self._entries: dict[str, _Entry] = {}
        self._gone: dict[str, int] = {}
        self._version = 0
        self._lock = threading.Lock()

    def changes(self, since: int = 0) -> Changes:
        """Look at the folders, read what changed, and return the rows that are newer than version `since`."""
        with self._lock:
            self._refresh()
            rows = [entry.row for entry in self._entries.values() if entry.version > since]
            gone = [name for name, version in self._gone.items() if version > since] if since else []
            return Changes(self._version, rows, gone)

    def folder(self, run: str) -> Path:
        """The directory of a known run; an error for everything else, so that no path outside the root is reached."""
        entry = self._entries.get(run)
        if entry is None:
            with self._lock:
                self._refresh()
            entry = self._entries.get(run)
        if entry is None or not entry.folder.is_dir():
            raise RunNotFoundError(f"There is no run '{run}' in {self.root}: it was deleted or renamed.")
        return entry.folder

    def row(self, run: str) -> Row:
        """The row of one run, fresh."""
        folder = self.folder(run)
        with self._lock:
            self._look_at(run, folder)
            return self._entries[run].row

    def _refresh(self) -> None:
        found = dict(find_runs(self.root))
        for name in [name for name in self._entries if name not in found]:
            del self._entries[name]
            self._version += 1
            self._gone[name] = self._version
        for name, folder in found.items():
            self._look_at(name, folder)

    def _look_at(self, name: str, folder: Path) -> None:
        signature = _signature(folder)
        entry = self._entries.get(name)
        if entry is not None and entry.signature == signature and not _may_have_died(entry.row):
            return
        self.reads += 1
        row = read_row(name, folder)
        if entry is not None and entry.row == row:
            entry.signature = signature
            return
        self._version += 1
        self._gone.pop(name, None)
        self._entries[name] = _Entry(folder, signature, row, self._version)


def find_runs(root: Path) -> Iterator[tuple[str, Path]]:
    """(path below the root, folder) of every run; the root itself may be one."""
    if is_run(root):
        yield root.name, root
        return
    folders = [root]
    for _ in range(DEPTH):
        below: list[Path] = []
        for folder in folders:
            for path in _subfolders(folder):
                if is_run(path):
                    yield str(path.relative_to(root)), path
                else:
                    below.append(path)
        folders = below


def root_of(run: Path, run_root: Path | str) -> tuple[Path, str]:
    """The folder to serve for one run, and the run's name in it: `run_root` where the run lies in it, else the run."""
    root = Path(run_root).expanduser().resolve()
    run = run.resolve()
    if run.is_relative_to(root) and 0 < len(run.relative_to(root).parts) <= DEPTH:
        return root, str(run.relative_to(root))
    return run, run.name


def is_run(folder: Path) -> bool:
    return os.path.exists(folder / RUN_FILE) or os.path.exists(folder / "config.yaml")


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")]  # fmt: skip
    except OSError:
        return []


def _signature(folder: Path) -> Signature:
    def stamp(name: str) -> tuple[int, int]:
        try:
            status = os.stat(folder / name)
        except OSError:
            return (0, 0)
        return (status.st_mtime_ns, status.st_size)

    return tuple(map(stamp, WATCHED))


def _may_have_died(row: Row) -> bool:
    """A process that was killed changes no file, so the row of a running run is made anew."""
    return row["status"] == "running"


# One row --------------------------------------------------------------------------------------------------------------


def read_row(name: str, folder: Path) -> Row:
    """One row of the table of runs. Any file may be missing, half-written or hostile: values are checked."""
    run = RunDirectory(folder)
    info, summary = run.info(), read_json(run.summary_json) or {}
    settings = scan_settings(run.config_yaml)
    recent = tail_rows(run.metrics_jsonl)
    last = recent[-1] if recent else {}
    status = str(info.get("status") or ("completed" if summary else "unknown"))
    if status == "running" and not is_being_written(folder):
        status = "lost"
    returns = _newest(recent, summary, (EVAL_RETURN,))
    env_steps = _first_number(summary.get("env_steps"), last.get("env_steps"))
    total = number(settings.get("training.total_timesteps"))
    speed = _first_number(summary.get("env_steps_per_s"), _speed(recent))
    left = (total - env_steps) / speed if status == "running" and total and env_steps is not None and speed else None
    return {
        "id": name,
        "experiment": str(settings.get("experiment.name") or folder.parent.name),
        "name": folder.name,
        "seed": settings.get("experiment.seed"),
        "status": status,
        "error": str(info["error"]) if info.get("error") else None,
        "workflow": str(settings.get("workflow._target_") or "").rsplit(".", 1)[-1],
        "environment": str(settings.get("environment.id") or ""),
        "size": settings.get("size"),
        "phase": str(last.get("phase") or ""),
        "env_steps": env_steps,
        "total_steps": total,
        "updates": _first_number(summary.get("updates"), last.get("updates")),
        "speed": speed,
        "eval_return": returns,
        "train_return": _newest(recent, {}, TRAIN_RETURNS),
        "wall_s": _first_number(summary.get("wall_s"), last.get("wall_s")),
        "left_s": max(left, 0.0) if left is not None else None,
        "start": str(info.get("start") or ""),
        "device": str(info.get("device") or ""),
        "parameters": _parameter_count(info),
        "can_dream": info.get("has_world_model") is not False,  # a run of an older version does not say
    }


def _parameter_count(info: dict[str, Any]) -> float | None:
    counts = info.get("parameters")
    return number(counts.get("total")) if isinstance(counts, dict) else None


def tail_rows(path: Path) -> list[dict[str, Any]]:
    """The last rows of metrics.jsonl that are whole objects, and the last ones with a return, in their order."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read()
    except OSError:
        return []
    lines = text.split(b"\n")
    wanted = set(range(max(0, len(lines) - RECENT_ROWS - 1), len(lines)))
    for name in (EVAL_RETURN, *TRAIN_RETURNS):
        at = text.rfind(f'"{name}"'.encode())
        if at >= 0:
            wanted.add(text.count(b"\n", 0, at))
    return [row for row in map(parse_object, (lines[at] for at in sorted(wanted))) if row is not None]


def _newest(rows: list[dict[str, Any]], summary: dict[str, Any], names: tuple[str, ...]) -> float | None:
    found = [summary.get(name) for name in names]
    found += [row.get(name) for row in reversed(rows) for name in names]
    return _first_number(*found)


def _first_number(*values: Any) -> float | None:
    return next((found for found in map(number, values) if found is not None), None)


def _speed(rows: list[dict[str, Any]]) -> float | None:
    """Env steps per second over the recent rows; over all of the time where there is one row only."""
    points = [(number(row.get("wall_s")), number(row.get("env_steps"))) for row in rows[-RECENT_ROWS:]]
    known = [(wall, steps) for wall, steps in points if wall is not None and steps is not None]
    if len(known) == 1:
        known.insert(0, (0.0, 0.0))
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return max(0.0, (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]))


_LINE = re.compile(r"^( *)([A-Za-z_][\w]*):(?: (.*))?$")
_SCANNED = ("experiment.name", "experiment.seed", "environment.id", "workflow._target_", "size",
            "training.total_timesteps")  # fmt: skip


def scan_settings(path: Path) -> dict[str, Any]:
    """A few settings of a config.yaml by their dotted paths. Reading a thousand files with a YAML parser takes half a
    minute; these are plain scalars in a file that RL Lab wrote, and a line is enough for each."""
    try:
        text = read_text(path)
    except OSError:
        return {}
    found: dict[str, Any] = {}
    section = ""
    for line in text.splitlines():
        match = None if line.startswith("   ") else _LINE.match(line)
        if match is None:
            continue
        indent, key, value = len(match[1]), match[2], (match[3] or "").strip()
        if indent == 0:
            section = key
        place = key if indent == 0 else f"{section}.{key}" if indent == 2 else ""
        if place in _SCANNED and value:
            found.setdefault(place, _scalar(value))
    return found


def _scalar(text: str) -> Any:
    if text in ("null", "~"):
        return None
    try:
        return int(text.replace("_", ""))
    except ValueError:
        return text.strip("'\"")

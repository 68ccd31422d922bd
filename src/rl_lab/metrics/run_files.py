"""A run directory as the report and the comparison read it. Any file may be missing, short or torn."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.logger import ROW_HEAD
from rl_lab.reading import parse_object, parse_yaml, read_text

# The first of these that a run has is "the return of training episodes".
TRAIN_RETURNS = ("collect/episode_return", "collect/episode_return_mean", "collect/return_mean", "collect/return")
EVAL_RETURN = "eval/return_mean"
LARGEST = 1e100  # no chart can be laid out far beyond it


@dataclass(frozen=True)
class RunFiles:
    """The files of a run so far."""

    folder: Path
    info: dict[str, Any]  # run.json
    config: dict[str, Any]
    config_text: str
    plan: str
    rows: list[dict[str, Any]]  # metrics.jsonl
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    imagination: dict[str, Any]
    planning: dict[str, Any]
    illustrations: list[dict[str, Any]]

    @property
    def axis(self) -> str:
        """The x axis of curves: env steps, or updates where no environment was stepped."""
        return "env_steps" if any(number(row.get("env_steps")) for row in self.rows) or not self.rows else "updates"

    def axis_of(self, name: str) -> str:
        """The x axis of one metric: updates where most of its points were logged without a step in between, as in
        phases that do not collect."""
        steps = self.series(name, self.axis)[0]
        return "updates" if len(steps) > 2 * len(set(steps.tolist())) else self.axis

    @property
    def axis_label(self) -> str:
        return self.axis.replace("_", " ")

    def names(self) -> list[str]:
        """The metrics that have at least one finite value to draw, sorted."""
        axis = self.axis
        drawn = [row for row in self.rows if number(row.get(axis)) is not None]
        found = {name for row in drawn for name, value in row.items() if number(value) is not None}
        return sorted(found - set(ROW_HEAD))

    def series(self, name: str, axis: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of one metric where it was logged with a finite value."""
        axis = axis or self.axis
        points = [(number(row.get(axis)), number(row.get(name))) for row in self.rows]
        known = [(x, y) for x, y in points if x is not None and y is not None]
        if len(known) > 1 and known[-1][0] == known[-2][0]:  # the row of the end, and the one just before it
            del known[-2]
        return np.array([x for x, _ in known], np.float64), np.array([y for _, y in known], np.float64)

    def train_return_name(self) -> str | None:
        names = set(self.names())
        return next((name for name in TRAIN_RETURNS if name in names), None)

    def last(self, name: str) -> float | None:
        """The summary's value, or the last one logged."""
        value = number(self.summary.get(name))
        if value is not None:
            return value
        return next((number(row.get(name)) for row in reversed(self.rows) if number(row.get(name)) is not None), None)

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the config by its dotted path."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    @property
    def experiment(self) -> str:
        return str(self.setting("experiment.name") or self.folder.parent.name)

    @property
    def seed(self) -> Any:
        return self.setting("experiment.seed")

    @property
    def status(self) -> str:
        return str(self.info.get("status") or ("completed" if self.summary else "unknown"))

    @property
    def parameters(self) -> dict[str, int]:
        """Trainable parameters by component, `total` among them."""
        counts = self.info.get("parameters")
        known = [(str(name), number(value)) for name, value in counts.items()] if isinstance(counts, dict) else []
        return {name: int(value) for name, value in known if value is not None}

    def videos(self) -> list[Path]:
        """Videos of evaluation episodes, oldest first; those made after the run come last."""
        folder = self.folder / "videos"
        found = [path for path in folder.glob("*") if path.suffix in (".mp4", ".gif")] if folder.is_dir() else []
        return sorted(found, key=_video_order)


def read_run(folder: Path, *, rows: bool = True) -> RunFiles:
    """Read the files of a run directory; what is missing is empty. Without `rows`, metrics.jsonl is left out."""
    folder = Path(folder)
    config_text = _text(folder / "config.yaml")
    return RunFiles(
        folder=folder,
        info=_mapping(_text(folder / "run.json")),
        config=_yaml(config_text),
        config_text=config_text,
        plan=_text(folder / "plan.txt"),
        rows=_lines(folder / "metrics.jsonl") if rows else [],
        summary=_mapping(_text(folder / "summary.json")),
        events=_lines(folder / "events.jsonl"),
        imagination=_mapping(_text(folder / "imagination" / "imagination.json")),
        planning=_mapping(_text(folder / "planning" / "planning.json")),
        illustrations=_entries(_text(folder / "imagination" / "illustrations.json")),
    )


def video_env_steps(path: Path) -> int | None:
    """The env steps that a video's name ends in; None where it was made after the run."""
    digits = path.stem.rsplit("-", 1)[-1]
    return int(digits) if digits.isdecimal() else None


def number(value: Any) -> float | None:
    """A finite number of a size that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else None


def _video_order(path: Path) -> tuple[float, str]:
    env_steps = video_env_steps(path)
    return (math.inf if env_steps is None else env_steps, path.name)


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _mapping(text: str) -> dict[str, Any]:
    return parse_object(text) or {}


def _entries(text: str) -> list[dict[str, Any]]:
    """A JSON list of objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole objects of a .jsonl file; a torn line is left out."""
    return [row for row in map(_mapping, _text(path).splitlines()) if row]


def _yaml(text: str) -> dict[str, Any]:
    try:
        value = parse_yaml(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

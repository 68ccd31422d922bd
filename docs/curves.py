"""Our learning curves beside the published numbers: a table and a picture for a page of the documentation."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rl_lab.metrics.charts import COLOURS, Panel, Series, svg_file

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"
PUBLISHED = COLOURS[7]


class Published(NamedTuple):
    scores: dict[int, float]  # by frames
    where: str | None  # how their setting differs from ours


def published() -> dict[str, dict[str, Published]]:
    """By page and experiment."""
    pages = yaml.safe_load((DOCS / "published.yaml").read_text(encoding="utf-8"))
    return {
        page: {name: Published(scores, where=scores.pop("where", None)) for name, scores in experiments.items()}
        for page, experiments in pages.items()
    }


def recorded(experiments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results files of those experiments that have one."""
    paths = {name: RESULTS / f"{name}.json" for name in experiments}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def curves_table(page: str) -> str:
    """Ours and theirs, and the picture of the curves."""
    reference = published()[page]
    results = recorded(reference)
    if not results:
        return "None of its experiments has a results file yet."
    lines = ["| Experiment | Frames | Return of each seed | Published |", "|---|--:|---|---|"]
    for name, result in results.items():
        frames = max(row["frames"] for row in result["rows"])
        seeds = ", ".join(f"{row['return_mean']:,.0f}" for row in result["rows"])
        theirs = ", ".join(f"{score:,g} at {_short(at)}" for at, score in reference[name].scores.items()) or "–"
        theirs += f" ({reference[name].where})" if reference[name].where else ""
        lines.append(f"| `{name}` | {_short(frames)} | {seeds} | {theirs} |")
    picture = f"![Return by frames, one line for each seed, with the published numbers](pictures/curves_{page}.svg)"
    return "\n".join([*lines, "", picture])


def draw_curves(page: str) -> Path | None:
    """One panel for each experiment: returns while training, the score on fresh episodes, published numbers."""
    reference = published()[page]
    panels = [_panel(name, result, reference[name]) for name, result in recorded(reference).items()]
    if not panels:
        return None
    columns = min(3, len(panels))
    path = DOCS / "pictures" / f"curves_{page}.svg"
    return svg_file(path, panels, columns=columns, width=3.4 * columns, height=2.6)


def _panel(name: str, result: dict[str, Any], reference: Published) -> Panel:
    scored: list[Series] = []
    training: list[Series] = []
    for row in result["rows"]:
        frames, returns = episodes(row)
        first = not scored
        training.append(Series(frames, returns, "episodes while training" if first else None, width=0.8, alpha=0.35))
        frames, returns = evaluations(row)
        scored.append(Series(frames, returns, "evaluations, each seed" if first else None, kind="both", width=1.2))
    series = training + scored
    end = 1.3 * max(row["frames"] for row in result["rows"])
    shown = {at: score for at, score in reference.scores.items() if at <= end}
    if shown:
        series.append(Series(list(shown), list(shown.values()), _label(reference), colour=PUBLISHED, kind="dots"))
    return Panel(series, title=name, x_label="frames", y_label="return")


def evaluations(row: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Frames and returns of a seed's evaluations while training, and of the fresh episodes at the end."""
    with (RESULTS / row["curve"]).open(encoding="utf-8") as file:
        frames, returns = _column(list(csv.DictReader(file)), "eval/return_mean")
    return [*frames, row["frames"]], [*returns, row["return_mean"]]


def episodes(row: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Frames and returns of a seed's episodes while training."""
    with (RESULTS / row["curve"]).open(encoding="utf-8") as file:
        return _column(list(csv.DictReader(file)), "collect/episode_return")


def _label(reference: Published) -> str:
    return f"published ({reference.where})" if reference.where else "published"


def _column(curve: list[dict[str, str]], name: str) -> tuple[list[int], list[float]]:
    """Where that value was logged: frames and values."""
    rows = [row for row in curve if row[name]]
    return [int(row["frames"]) for row in rows], [float(row[name]) for row in rows]


def _short(frames: int) -> str:
    if frames >= 1_000_000 and frames % 100_000 == 0:
        return f"{frames / 1_000_000:g}M"
    return f"{frames / 1_000:g}k"

"""The parts of a report that only some workflows have: what a model sees, and how a population evolved."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from rl_lab.metrics.charts import COLOURS, Panel, Series, svg_chart
from rl_lab.metrics.page import both_widths, media, section
from rl_lab.metrics.run_files import RunFiles, number

FITNESS = "workflow/fitness_mean"


def evolution(run: RunFiles) -> str:
    """Fitness by generation, a curve for each phase that evolved."""
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for row in run.rows:
        if number(row.get(FITNESS)) is not None:
            by_phase.setdefault(str(row.get("phase", "")), []).append(row)
    series: list[Series] = []
    for index, (phase, rows) in enumerate(by_phase.items()):
        colour = COLOURS[index % len(COLOURS)]
        mean, best, std = (_values(rows, f"workflow/fitness_{name}") for name in ("mean", "best", "std"))
        generation = np.arange(1, len(rows) + 1)
        series.append(Series(generation, mean, f"{phase}: mean ± std", colour, low=mean - std, high=mean + std))
        series.append(Series(generation, best, f"{phase}: best member", colour, dashes=(0, (4, 1.5)), width=1.0))
    if not series:
        return ""
    panel = [Panel(series, x_label="generation", y_label="return of an episode")]
    chart = both_widths(svg_chart(panel, width=8.6, height=3.4), svg_chart(panel, width=4.6, height=3.6))
    text = (
        "The fitness of the population: the mean return over a member's episodes, which are the same for all members "
        "of a generation. In a dream it is what the model pays, which may be more than the game does; evaluations tell."
    )
    return section("Evolution", chart, text=text)


def _values(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([number(row.get(name)) or 0.0 for row in rows])


def illustrations(run: RunFiles) -> str:
    """The pictures that a workflow made of its model."""
    folder, parts = run.folder / "imagination", []
    for entry in run.illustrations:
        shown = media(folder / str(entry.get("picture")), str(entry.get("title", "")), wide=True)
        film = media(folder / str(entry["video"]), "as a film") if entry.get("video") else ""
        if shown or film:
            beside = f'<div class="media">{film}</div>' if film else ""
            parts.append(f'<p class="quiet">{escape(str(entry.get("text", "")))}</p>{shown}{beside}')
    return section("What the model sees", *parts)

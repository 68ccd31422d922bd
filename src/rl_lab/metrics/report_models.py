"""The parts of a report that only some workflows have: what a model sees, and how a population evolved."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from rl_lab.metrics.charts import COLOURS, Panel, Series, svg_chart
from rl_lab.metrics.page import both_widths, figure_number, media, section, table
from rl_lab.metrics.run_files import EVAL_RETURN, RunFiles, number

FITNESS = "workflow/fitness_mean"
DREAM_RETURN = "workflow/dream_return_mean"
QUALITIES = (  # of World Models' V and M: the name of a metric, and what it says
    ("train/loss/v_reconstruction", "V: squared error of an image, summed over its pixels"),
    ("train/loss/v_kl", "V: KL divergence of a code, in nats"),
    ("workflow/active_dimensions", "Entries of the code that V uses"),
    ("workflow/m_loss", "M: loss of the next code, in nats for each of those entries"),
    ("workflow/m_loss_if_nothing_changed", "the same of a forecast that the code stays as it is"),
    ("workflow/m_loss_shuffled_actions", "M with the actions of other sequences"),
    ("workflow/m_share_better", "Share of entries in which M beats the forecast that nothing changes"),
)


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
    return section("Evolution", chart, _dream_and_game(run), text=text)


def _dream_and_game(run: RunFiles) -> str:
    """A table of the returns that the controller ended each phase with, where one was played in a dream."""
    dreamed = _last_by_phase(run, DREAM_RETURN)
    played = _last_by_phase(run, EVAL_RETURN)
    rows = [(phase, figure_number(value), figure_number(played.get(phase))) for phase, value in dreamed.items()]
    return table(("phase", "return in its dream", "return in the game"), rows) if rows else ""


def _last_by_phase(run: RunFiles, name: str) -> dict[str, float]:
    found = ((str(row.get("phase", "")), number(row.get(name))) for row in run.rows)
    return {phase: value for phase, value in found if value is not None}


def stages(run: RunFiles) -> str:
    """A table of the last values of the metrics that judge V and M of World Models, which are trained separately."""
    rows = []
    for name, text in QUALITIES:
        values = [value for row in run.rows if (value := number(row.get(name))) is not None]
        if values:
            rows.append((text, figure_number(values[-1])))
    text = "A good score of the controller does not prove that M is a good model: these figures tell."
    return section("V and M", table(("measure", "value"), rows), text=text) if rows else ""


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

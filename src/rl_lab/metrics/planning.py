"""What a planner considered, and how its promises compared with what came: pictures and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rl_lab.metrics.charts import (
    IMAGINED,
    REAL,
    Panel,
    Series,
    draw_panel,
    literal,
    new_figure,
    png_chart,
    style,
    to_png,
)
from rl_lab.metrics.imagination_vectors import entry_name, moving_entries
from rl_lab.metrics.search_trees import calibration_picture, trees_picture
from rl_lab.records import PlannedDecision, PlannedEpisode

CANDIDATE, HAPPENED = "#8a93a0", "#1f2328"
MAX_ENTRIES = 3
HEAVY = 0.25  # of the largest weight: such particles are coloured


def write_planning(episode: PlannedEpisode, folder: Path) -> list[Path]:
    """plans.png (where the model says where plans lead), values.png and planning.json; the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [_plans_picture(episode, folder / "plans.png")] if episode.decisions else []
    files.append(_values_picture(episode, folder / "values.png"))
    if episode.searches:
        files.append(trees_picture(episode.searches, folder / "trees.png"))
        files.append(calibration_picture(episode, folder / "calibration.png"))
    known = np.isfinite(episode.received) & np.isfinite(episode.expected)
    numbers = {
        "horizon": episode.horizon,
        "beyond_horizon": episode.beyond_horizon,
        "decisions": len(episode.expected),
        "expected_mean": float(episode.expected[known].mean()) if known.any() else None,
        "received_mean": float(episode.received[known].mean()) if known.any() else None,
    }
    target = folder / "planning.json"
    target.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    return [*files, target]


def _plans_picture(episode: PlannedEpisode, path: Path) -> Path:
    """A row for each decision, a column for each entry of the observation that moves most."""
    assert episode.key is not None
    real = np.concatenate([decision.real for decision in episode.decisions])[None]
    entries, size = moving_entries(real, MAX_ENTRIES), real.shape[-1]
    rows, columns = len(episode.decisions), len(entries)
    figure = new_figure(3.4 * columns + 0.4, 2.0 * rows + 0.7)
    with style():
        grid = figure.subplots(rows, columns, squeeze=False)
        for row, decision in enumerate(episode.decisions):
            for column, entry in enumerate(entries):
                title = entry_name(episode.key, entry, size) if row == 0 else ""
                x_label = "steps ahead" if row == rows - 1 else ""
                y_label = "\n".join(filter(None, [f"decision {decision.step}", decision.note])) if column == 0 else ""
                panel = Panel(_fan(decision, entry), title, x_label, y_label, legend=False)
                draw_panel(grid[row, column], panel)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=8.5,
            title=literal(f"What the planner considered over {episode.horizon} steps"),
            title_fontproperties={"weight": "bold", "size": 10.5}, alignment="left",
        )  # fmt: skip
    return to_png(figure, path)


def _fan(decision: PlannedDecision, entry: int) -> list[Series]:
    ahead = np.arange(decision.chosen.shape[0])
    series = [] if decision.weight is None else _by_weight(ahead, decision.paths[:, :, entry], decision.weight)
    if series:
        return [*series, *_outcome(ahead, decision, entry)]
    for elite, colour, label in ((False, CANDIDATE, "candidates"), (True, IMAGINED, "the best of them")):
        for number, line in enumerate(decision.paths[decision.is_elite == elite, :, entry]):
            name = label if number == 0 else None
            series.append(Series(ahead, line, name, colour, width=0.9, alpha=0.7 if elite else 0.35))
    return [*series, *_outcome(ahead, decision, entry)]


def _by_weight(ahead: np.ndarray, lines: np.ndarray, weight: np.ndarray) -> list[Series]:
    """Particles: the more weight, the thicker and clearer the line; the heaviest comes last, on top."""
    share = weight / max(float(weight.max()), np.finfo(np.float64).tiny)
    order = np.argsort(share)
    names = {int(order[0]): "candidates", int(order[-1]): "those with more weight"}
    return [
        Series(
            ahead, lines[index], names.get(int(index)), IMAGINED if share[index] > HEAVY else CANDIDATE,
            width=0.7 + 1.3 * float(share[index]), alpha=0.25 + 0.6 * float(share[index]),
        )
        for index in order
    ]  # fmt: skip


def _outcome(ahead: np.ndarray, decision: PlannedDecision, entry: int) -> list[Series]:
    real = decision.real[:, entry]
    return [
        Series(ahead, decision.chosen[:, entry], "the chosen plan", REAL, width=2.2),
        Series(ahead[: len(real)], real, "what happened", HAPPENED, width=1.4, dashes=(0, (4, 1.5))),
    ]


def _values_picture(episode: PlannedEpisode, path: Path) -> Path:
    """Over the episode, and one against the other."""
    step = np.arange(len(episode.expected))
    over = f"over {episode.horizon} steps" + (" and what was promised then" if episode.beyond_horizon else "")
    series = [
        Series(step, episode.expected, "what the plan promised", IMAGINED, dashes=(0, (4, 1.5))),
        Series(step, episode.received, "what came", REAL),
    ]
    panels = [Panel(series, f"Return {over}", "decision", "return")]
    known = np.isfinite(episode.received) & np.isfinite(episode.expected)
    if known.any():
        both = np.concatenate([episode.received[known], episode.expected[known]])
        ends = [float(both.min()), float(both.max())]
        scatter = [
            Series(ends, ends, "as promised", CANDIDATE, dashes=(0, (4, 1.5)), width=1.2),
            Series(episode.received[known], episode.expected[known], "decisions", IMAGINED, "dots", alpha=0.5),
        ]
        panels.append(Panel(scatter, "Promised against received", "what came", "what the plan promised"))
    return png_chart(path, panels, columns=len(panels), width=4.8 * len(panels), height=3.2)

"""Imagined vectors: one curve per entry, real beside imagined, as a picture and as a video that draws them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rl_lab.metrics.charts import (
    IMAGINED,
    REAL,
    Panel,
    Series,
    decorate,
    draw_panel,
    literal,
    new_figure,
    style,
    to_png,
)
from rl_lab.metrics.imagination_images import headline_of, mark, with_pause

MAX_CURVES = 8
MAX_VIDEO_CURVES = 4
DASHED = (0, (4, 1.5))


def vector_picture(
    path: Path,
    key: str,
    real: np.ndarray,
    imagined: np.ndarray,
    context: int,
    error: np.ndarray,
    baseline: np.ndarray,
) -> Path:
    """The entries that move most, in the first sequence; below them the error by step over all sequences."""
    truth, dream = flat(real), flat(imagined)
    entries = moving_entries(truth, MAX_CURVES)
    ahead = np.arange(truth.shape[1]) - (context - 1)
    columns = 1 if len(entries) == 1 else 2
    rows = -(-len(entries) // columns)
    figure = new_figure(9.0, 0.7 + 1.55 * rows + 2.1)
    shaded = (float(ahead[0]), 0.5)
    with style():
        grid = figure.add_gridspec(rows + 1, columns, height_ratios=[1.0] * rows + [1.3])
        for position, entry in enumerate(entries):
            axes = figure.add_subplot(grid[position // columns, position % columns])
            series = [
                Series(ahead, truth[0, :, entry], "what happened", REAL),
                Series(ahead, dream[0, :, entry], "what the model imagined", IMAGINED, dashes=DASHED),
            ]
            title = entry_name(key, entry, truth.shape[-1])
            draw_panel(axes, Panel(series, title, shaded=shaded, shaded_label="the model could see", legend=False))
            if position == 0:
                handles, labels = axes.get_legend_handles_labels()
                headline = headline_of(key, context, truth.shape[1] - context)
                figure.legend(
                    handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=8.5,
                    title=literal(headline), title_fontproperties={"weight": "bold", "size": 10.5}, alignment="left",
                )  # fmt: skip
        axes = figure.add_subplot(grid[rows, :])
        series = [
            Series(ahead, error, "imagination", IMAGINED),
            Series(ahead[context - 1 :], baseline[context - 1 :], "if nothing changed any more", "#8a93a0",
                   dashes=DASHED),
        ]  # fmt: skip
        title = f"How far off? Error (RMSE) by step, over {len(truth)} sequence{'s' if len(truth) > 1 else ''}"
        x_label = "steps ahead of the last thing seen"
        draw_panel(axes, Panel(series, title, x_label, shaded=shaded, from_zero=True))
    return to_png(figure, path)


def vector_video(key: str, real: np.ndarray, imagined: np.ndarray, context: int) -> np.ndarray:
    """Frames in which both curves of the first sequence are drawn step by step."""
    truth, dream = flat(real)[0], flat(imagined)[0]
    entries = moving_entries(flat(real), MAX_VIDEO_CURVES)
    ahead = np.arange(len(truth)) - (context - 1)
    figure = new_figure(6.4, 0.9 + 1.15 * len(entries), dpi=100)
    lines = []
    with style():
        rows = figure.subplots(len(entries), 1, squeeze=False, sharex=True)[:, 0]
        for axes, entry in zip(rows, entries, strict=True):
            decorate(axes)
            axes.set_title(literal(entry_name(key, entry, truth.shape[-1])), loc="left", fontsize=8.5)
            axes.axvspan(float(ahead[0]), 0.5, color="#8a93a0", alpha=0.18, lw=0)
            both = np.concatenate([truth[:, entry], dream[:, entry]])
            both = both[np.isfinite(both)] if np.isfinite(both).any() else np.zeros(1)
            room = 0.08 * max(float(both.max() - both.min()), 1e-6)
            axes.set_xlim(float(ahead[0]) - 0.2, float(ahead[-1]) + 0.2)
            axes.set_ylim(both.min() - room, both.max() + room)
            lines.append(axes.plot([], [], color=REAL, lw=1.8, label="what happened", animated=True)[0])
            lines.append(axes.plot([], [], color=IMAGINED, lw=1.8, ls=DASHED, label="imagined", animated=True)[0])
        rows[-1].set_xlabel("steps ahead of the last thing seen", fontsize=8.5)
        figure.legend(*rows[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
        frames = _blit(figure, lines, truth[:, entries], dream[:, entries], ahead, context)
    return with_pause(np.stack(frames))


def _blit(
    figure: object, lines: list, truth: np.ndarray, dream: np.ndarray, ahead: np.ndarray, context: int
) -> list[np.ndarray]:
    """Draw the still parts once and only the curves in every frame: ten times faster than whole figures."""
    canvas = figure.canvas  # type: ignore[attr-defined]
    banner = figure.text(0.02, 0.985, "", ha="left", va="top", fontsize=9.5, color="white")  # type: ignore[attr-defined]
    banner.set_animated(True)
    canvas.draw()
    still = canvas.copy_from_bbox(figure.bbox)  # type: ignore[attr-defined]
    frames = []
    for step in range(len(truth)):
        canvas.restore_region(still)
        for position, line in enumerate(lines):
            values = (truth, dream)[position % 2][: step + 1, position // 2]
            line.set_data(ahead[: step + 1], values)
            line.axes.draw_artist(line)
        mark(banner, step, context)
        banner.draw(canvas.get_renderer())
        frames.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    return frames


def flat(values: np.ndarray) -> np.ndarray:
    """[batch, time, entries] float64."""
    return values.astype(np.float64).reshape(*values.shape[:2], -1)


def moving_entries(truth: np.ndarray, limit: int) -> list[int]:
    """All entries, or the `limit` that change most, in their own order."""
    size = truth.shape[-1]
    if size <= limit:
        return list(range(size))
    movement = truth.std(axis=1).mean(axis=0)
    return sorted(np.argsort(-movement, kind="stable")[:limit].tolist())


def entry_name(key: str, entry: int, size: int) -> str:
    return key if size == 1 else f"{key}[{entry}]"

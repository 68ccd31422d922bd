"""Paths in a plane, as small pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_lab.metrics.charts import new_figure, style
from rl_lab.metrics.imagination_images import DPI, grab

GROUND = "#c9cfd6"


class Path2D(NamedTuple):
    """A line through the points [step, 2]."""

    points: np.ndarray
    colour: str
    width: float = 1.6
    alpha: float = 1.0
    dashed: bool = False


def draw_paths(
    ground: np.ndarray, paths: Sequence[Path2D], *, start: np.ndarray, goal: np.ndarray | None, pixels: int
) -> np.ndarray:
    """A square picture [pixels, pixels, 3]: where the data have been (`ground` [point, 2]), the paths, where they begin
    (a dot) and the goal (a star)."""
    figure = new_figure(pixels / DPI, pixels / DPI, arranged=False)
    low, high = ground.min(0), ground.max(0)
    middle, half = 0.5 * (low + high), 0.56 * float((high - low).max())
    with style():
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(middle[0] - half, middle[0] + half)
        axes.set_ylim(middle[1] - half, middle[1] + half)
        axes.scatter(ground[:, 0], ground[:, 1], s=5.0, color=GROUND, linewidths=0)
        for path in paths:
            dashes = (0, (3, 1.5)) if path.dashed else "-"
            axes.plot(*path.points.T, color=path.colour, lw=path.width, alpha=path.alpha, ls=dashes)
        axes.plot(*start, "o", color="#1f2328", ms=4.0)
        if goal is not None:
            axes.plot(*goal, "*", color="#1f2328", ms=8.0)
    picture: np.ndarray = grab(figure)[..., :3]
    return picture

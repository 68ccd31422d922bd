"""The one way that RL Lab draws: panels of series, as inline SVG or as PNG files.

Matplotlib without pyplot, so nothing global is touched. Backgrounds are transparent in SVG and the ink is the colour of
the surrounding text, so a chart fits a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito, with lightness moved so that each is readable on white and on near-black.
COLOURS = ("#2f86c8", "#e07b1a", "#1a9b7c", "#c4629a", "#8f7ad6", "#b3951a", "#4fb3d9", "#c4503a")
REAL, IMAGINED, ERROR = COLOURS[0], COLOURS[1], COLOURS[7]
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

_INK = "#1f2328"
_SVG_INK = "#010203"  # stands for "the page's text colour" until the SVG is written
_LEGEND_KEY, _LEGEND_LETTER = 0.6, 0.068  # inches of a legend: line and margins, a letter
_PARAMETERS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rl-lab",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True)
class Series:
    """One curve. `low` and `high` draw a band around it."""

    x: ArrayLike
    y: ArrayLike
    label: str | None = None
    colour: str = COLOURS[0]
    kind: Literal["line", "dots", "both"] = "line"
    width: float = 1.8
    alpha: float = 1.0
    dashes: Any = "-"
    low: ArrayLike | None = None
    high: ArrayLike | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    shaded: tuple[float, float] | None = None  # a span of x that is marked
    shaded_label: str = ""
    from_zero: bool = False
    log_x: bool = False
    y_limits: tuple[float, float] | None = None
    legend: bool = True
    marks: Sequence[float] = field(default_factory=tuple)  # vertical lines


def draw(
    panels: Sequence[Panel], *, columns: int = 1, width: float = 7.5, height: float = 2.8, svg: bool,
    legend_below: bool = False, compact: bool = False,
) -> Figure:  # fmt: skip
    """Panels in a grid; `width` is the figure's, `height` one row's, both in inches.

    `legend_below`: one legend for all panels, that of the first, under them. `compact`: one panel without labels and
    with fixed margins, drawn in half the time.
    """
    rows = -(-len(panels) // columns)
    figure = new_figure(width, height * rows, arranged=not compact)
    if compact:
        figure.subplots_adjust(0.55 / width, 0.28 / height, 1 - 0.08 / width, 1 - 0.08 / height)
    ink = _SVG_INK if svg else _INK
    with style():
        grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).reshape(-1)
        for axes, panel in zip(grid, panels, strict=False):
            draw_panel(axes, replace(panel, legend=panel.legend and not legend_below), ink=ink)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if legend_below:
            handles, labels = grid[0].get_legend_handles_labels()
            columns = 1 if max(map(len, labels), default=0) > 40 else 2
            letters = int((width / columns - _LEGEND_KEY) / _LEGEND_LETTER)
            place: Any = {"loc": "outside lower left", "ncols": columns, "frameon": False}
            figure.legend(handles, [fill(text, letters) for text in labels], fontsize=8, labelcolor=ink, **place)
    return figure


def svg_chart(panels: Sequence[Panel], **layout: Any) -> str:
    """An <svg> element for a page; `layout` as for `draw`."""
    return to_svg(draw(panels, svg=True, **layout))


def png_chart(path: Path, panels: Sequence[Panel], **layout: Any) -> Path:
    """A PNG file on white."""
    return to_png(draw(panels, svg=False, **layout), path)


def svg_file(path: Path, panels: Sequence[Panel], **layout: Any) -> Path:
    """An SVG file of its own, on white."""
    figure = draw(panels, svg=False, **layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
    return path


def draw_panel(axes: Axes, panel: Panel, *, ink: str = _INK) -> None:
    """Draw one panel in the house style."""
    decorate(axes, ink)
    if panel.log_x:
        _logarithmic(axes)
    if panel.title:
        axes.set_title(literal(panel.title), loc="left", fontsize=9.5, color=ink, pad=6)
    axes.set_xlabel(literal(panel.x_label), color=ink, fontsize=8.5)
    axes.set_ylabel(literal(panel.y_label), color=ink, fontsize=8.5)
    if panel.shaded:
        axes.axvspan(*panel.shaded, color="#8a93a0", alpha=0.18, lw=0, label=panel.shaded_label or None)
    for mark in panel.marks:
        axes.axvline(mark, color="#8a93a0", lw=1.0, ls=(0, (3, 2)))
    for series in panel.series:
        _draw_series(axes, series)
    if panel.from_zero:
        axes.set_ylim(bottom=0.0)
    if panel.y_limits:
        axes.set_ylim(panel.y_limits)
    labels = [text for text in axes.get_legend_handles_labels()[1] if text]
    if panel.legend and labels:
        axes.legend(frameon=False, fontsize=8, labelcolor=ink, loc="best", handlelength=1.8, borderaxespad=0.3)


def decorate(axes: Axes, ink: str = _INK) -> None:
    """Axes of the house style: two spines, a faint grid, numbers such as 20k."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#8a93a0")
        axes.spines[side].set_linewidth(0.8)
    axes.grid(True, color="#8a93a0", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, labelsize=8, width=0.6, length=3, color="#8a93a0")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _position: short_number(value)))
    axes.margins(x=0.02, y=0.08)


def _logarithmic(axes: Axes) -> None:
    """An x axis of powers of ten, with numbers such as 20k."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: short_number(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_series(axes: Axes, series: Series) -> None:
    x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
    if series.low is not None and series.high is not None:
        low, high = np.asarray(series.low, np.float64), np.asarray(series.high, np.float64)
        axes.fill_between(x, low, high, color=series.colour, alpha=0.18, lw=0)
    label = literal(series.label) if series.label else None
    few = np.isfinite(y).sum() <= 1  # one point has no line
    if series.kind == "dots" or (few and series.kind == "line"):
        size = 6.0 if few else 4.0 if len(y) < 40 else 2.6
        axes.plot(x, y, "o", color=series.colour, ms=size, mew=0, alpha=series.alpha, label=label)
        return
    marker = "o" if series.kind == "both" else ""
    axes.plot(
        x, y, color=series.colour, lw=series.width, alpha=series.alpha, ls=series.dashes, label=label,
        marker=marker, ms=4.5, mew=0, solid_joinstyle="round", solid_capstyle="round",
    )  # fmt: skip


def literal(text: str) -> str:
    """Text as it is: a dollar sign would start a formula."""
    return text.replace("$", r"\$")


def smooth(y: ArrayLike, window: int) -> np.ndarray:
    """A centred moving mean that ignores gaps; the window shrinks at the ends."""
    values = np.asarray(y, np.float64)
    half = max(0, window // 2)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    low, high = np.maximum(0, index - half), np.minimum(len(values), index + half + 1)
    count = counts[high] - counts[low]
    return np.where(count > 0, (sums[high] - sums[low]) / np.maximum(count, 1), np.nan)


def short_number(value: float) -> str:
    """12,000 as 12k, 0.00025 as 2.5e-4."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{unit}"
    if size == 0 or size >= 0.01:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def new_figure(width: float, height: float, *, dpi: int = 110, arranged: bool = True) -> Figure:
    """An empty figure in inches that belongs to nobody. `arranged`: matplotlib makes room for labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    return figure


def style() -> Any:
    """The context in which text is laid out and figures are written."""
    import matplotlib

    return matplotlib.rc_context(_PARAMETERS)


def to_png(figure: Figure, path: Path) -> Path:
    """Write the figure on a white ground."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, format="png", facecolor="white")
    return path


def thin(x: ArrayLike, y: ArrayLike, limit: int = 240) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At most `limit` points (x, mean, low, high), each standing for a run of neighbours; gaps are left out."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    known = np.isfinite(ys)
    xs, ys = xs[known], ys[known]
    if len(ys) <= limit:
        return xs, ys, ys, ys
    edges = np.linspace(0, len(ys), limit + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(ys)])
    mean_x, mean_y = np.add.reduceat(xs, edges) / counts, np.add.reduceat(ys, edges) / counts
    return mean_x, mean_y, np.minimum.reduceat(ys, edges), np.maximum.reduceat(ys, edges)


def to_svg(figure: Figure) -> str:
    """The figure as one <svg> element: text as text, ink in the page's colour, as wide as its place."""
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace(_SVG_INK, "currentColor").replace("'DejaVu Sans'", "inherit")
    svg = re.sub(r"<svg [^>]*?viewBox=\"([^\"]+)\"[^>]*>", _open_svg, svg, count=1, flags=re.DOTALL)
    return re.sub(r"\n\s*", "\n", svg).strip()


def _open_svg(match: re.Match[str]) -> str:
    return f'<svg class="chart" viewBox="{match.group(1)}" role="img">'

"""The summary of a dataset as text, and as a web page with its histogram and some of its pictures."""

from __future__ import annotations

import base64
import io
import math
from html import escape

import numpy as np
from PIL import Image

from rl_lab.datasets.inspection import DatasetSummary
from rl_lab.metrics.charts import new_figure, short_number, to_svg
from rl_lab.metrics.page import facts, page, section, table

BAR = "█"
WIDEST = 40
MOST_NAMED = 8  # constant entries that are named one by one
HEAD = ("field", "shape", "dtype", "low", "high", "not finite", "constant entries")


def as_text(summary: DatasetSummary) -> str:
    values = summary.as_dict()
    lines = [
        f"{summary.path}: {_episodes(summary.episodes)}, {values['decisions']:,} decisions "
        f"(from {values['length_min']} to {values['length_max']} an episode), {summary.terminated:,} terminated"
    ]
    if summary.environment:
        lines.append(f"environment {summary.environment}, recorded from {summary.recorded_from or 'somewhere else'}")
    if summary.returns is None:
        lines.append("no rewards")
    else:
        histogram = values["returns_histogram"]
        mean, deviation, low, high = (
            f"{values[f'return_{name}']:.{_decimals(histogram)}f}" for name in ("mean", "std", "min", "max")
        )
        lines.append(f"return {mean} ± {deviation} (from {low} to {high})")
        lines += _histogram(histogram)
    lines += _field_lines(summary)
    if summary.incomplete:
        lines.append(f"without the observation after the last action: {_episodes(summary.incomplete)}")
    lines.append(f"alignment: {summary.alignment}")
    return "\n".join([*lines, *(f"note: {note}" for note in summary.notes)])


def _episodes(count: int) -> str:
    return "1 episode" if count == 1 else f"{count:,} episodes"


def _histogram(histogram: dict[str, list[float]]) -> list[str]:
    edges, counts = histogram["edges"], histogram["counts"]
    most, decimals = max(counts) or 1, _decimals(histogram)
    return [
        f"  {edges[index]:>10.{decimals}f} … {edges[index + 1]:<10.{decimals}f} "
        f"{(BAR * round(WIDEST * count / most)).ljust(WIDEST)} {count}"
        for index, count in enumerate(counts)
    ]


def _decimals(histogram: dict[str, list[float]]) -> int:
    """The number of decimals with which neighbouring bin edges print differently, at least 2."""
    width = histogram["edges"][1] - histogram["edges"][0]
    return max(2, 1 - math.floor(math.log10(width))) if width > 0.0 else 2


def _field_rows(summary: DatasetSummary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, entry in summary.fields.items():
        shape = "×".join(map(str, entry.shape)) or "scalar"
        size, constant = int(np.prod(entry.shape, dtype=int)), ", ".join(map(str, entry.constant[:MOST_NAMED]))
        if len(entry.constant) > MOST_NAMED:
            constant = f"{len(entry.constant):,} of {size:,}"
        low, high = (short_number(float(value)) for value in (entry.low.min(), entry.high.max()))
        rows.append((name, shape, entry.dtype, low, high, str(entry.bad), constant or "none"))
    return rows


def _field_lines(summary: DatasetSummary) -> list[str]:
    lines = []
    for name, shape, dtype, low, high, bad, constant in _field_rows(summary):
        warnings = ([f"{bad} numbers are NaN or infinite"] if bad != "0" else []) + (
            [f"constant entries: {constant}"] if constant != "none" else []
        )
        lines.append(f"  {name}: {shape} {dtype}, from {low} to {high}" + "".join(f"; {text}" for text in warnings))
    return lines


def as_page(summary: DatasetSummary) -> str:
    """A self-contained page."""
    values = summary.as_dict()
    entries = [("episodes", f"{summary.episodes:,}"), ("decisions", f"{values['decisions']:,}")]
    if summary.returns is not None:
        entries.insert(0, ("mean return", short_number(values["return_mean"])))
    pictures = [_strip(key, frames) for key, frames in summary.frames.items()]
    body = [
        f"<h1>{escape(summary.path)}</h1>",
        facts(entries),
        section("Returns", "" if summary.returns is None else _chart(np.asarray(summary.returns))),
        section("Fields", table(HEAD, _field_rows(summary))),
        section("Pictures", *pictures, text="Frames of the first episode, from its beginning to its end."),
        section("Origin, alignment and notes", table(("what", "found"), _remarks(summary))),
    ]
    return page(f"Dataset {summary.path}", body)


def _remarks(summary: DatasetSummary) -> list[tuple[str, str]]:
    lengths = f"from {min(summary.lengths):,} to {max(summary.lengths):,}"
    return [
        ("environment", summary.environment or "not said"),
        ("recorded from", summary.recorded_from or "not said"),
        ("decisions of an episode", lengths),
        ("alignment", summary.alignment),
        ("episodes that terminated", f"{summary.terminated} of {summary.episodes}"),
        ("episodes without their last observation", str(summary.incomplete)),
        *(("note", note) for note in summary.notes),
    ]


def _chart(returns: np.ndarray) -> str:
    figure = new_figure(7.0, 2.4)
    axes = figure.subplots()
    axes.hist(returns, bins=min(30, max(5, len(returns) // 3)))
    axes.set_xlabel("return of an episode")
    axes.set_ylabel("episodes")
    axes.locator_params("y", integer=True)
    return to_svg(figure)


def _strip(key: str, frames: np.ndarray) -> str:
    image = np.concatenate(list(frames), 1)
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, "PNG")
    source = base64.b64encode(buffer.getvalue()).decode()
    key = escape(key)
    return f'<figure><img alt="{key}" src="data:image/png;base64,{source}"><figcaption>{key}</figcaption></figure>'

"""Imagined images: a strip of pictures and a video, each real, imagined and different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.metrics.charts import IMAGINED, literal, new_figure, style

INK, OBSERVED = "#1f2328", "#6b7480"
ROWS = ("what happened", "what the model\nimagined", "difference")
MAX_SEQUENCES = 3
MAX_COLUMNS = 13
CELL, GAP = 84, 4  # pixels of a picture in the strip, and between two
VIDEO_CELL = 200
DPI = 110


def image_picture(path: Path, key: str, real: np.ndarray, imagined: np.ndarray, context: int) -> Path:
    """Rows: real, imagined, difference, for a few sequences. Columns: chosen steps; a line where observing ends."""
    columns = chosen_steps(real.shape[1], context)
    sequences = min(MAX_SEQUENCES, len(real))
    cells = _cells(real[:sequences, columns], imagined[:sequences, columns], CELL)
    height, width = cells.shape[3:5]
    left, top, block = 110, 92, 3 * (height + GAP) + 14
    split = 10  # extra space between the observed and the imagined columns
    x = [left + i * (width + GAP) + (split if step >= context else 0) for i, step in enumerate(columns)]
    y = [[top + s * block + row * (height + GAP) for row in range(3)] for s in range(sequences)]
    total_width, total_height = max(x[-1] + width + 12, 800), top + sequences * block + 4
    axes = canvas(total_width, total_height)
    for step, offset in zip(columns, x, strict=True):
        axes.text(offset + width / 2, top - 8, step_label(step, context), ha="center", fontsize=8, color=INK)
    for rows in y:
        for offset, text in zip(rows, ROWS, strict=True):
            place = {"ha": "right", "va": "center", "linespacing": 1.1}
            axes.text(left - 8, offset + height / 2, text, fontsize=7.5, color=INK, **place)
    headline = literal(headline_of(key, context, real.shape[1] - context))
    axes.text(12, 24, headline, fontsize=10.5, weight="bold", color=INK, va="center")
    seen = sum(step < context for step in columns)
    _bar(axes, x[0], x[seen - 1] + width, 54, OBSERVED, ("observing",))
    _bar(axes, x[seen], x[-1] + width, 54, IMAGINED, ("imagining (sees nothing, knows only the actions)", "imagining"))
    line = x[seen] - GAP / 2 - split / 2
    axes.plot([line, line], [54, total_height - 10], color=INK, lw=1.6)
    picture = grab(axes.figure)
    for s, column, row in np.ndindex(*cells.shape[:3]):
        paste(picture, cells[s, column, row], x[column], y[s][row])
    return save_picture(path, picture)


def image_video(real: np.ndarray, imagined: np.ndarray, context: int) -> np.ndarray:
    """Frames [time, height, width, 3]: real, imagined and error side by side, for up to two sequences."""
    steps, sequences = real.shape[1], min(2, len(real))
    cells = _cells(real[:sequences], imagined[:sequences], VIDEO_CELL)
    height, width = cells.shape[3:5]
    top, pad = 62, 8
    total_width, total_height = max(3 * (width + pad) + pad, 480), top + sequences * (height + pad)
    left = (total_width - 3 * width - 2 * pad) // 2
    axes = canvas(total_width, total_height)
    for column, text in enumerate(("what happened", "imagined", "difference")):
        middle = left + column * (width + pad) + width / 2
        axes.text(middle, top - 8, text, ha="center", fontsize=9, color=INK)
    banner = axes.text(total_width / 2, 22, "", ha="center", va="center", fontsize=10, color="white")
    frames = []
    for step in range(steps):
        mark(banner, step, context)
        frame = grab(axes.figure)
        for s, column in np.ndindex(sequences, 3):
            paste(frame, cells[s, step, column], left + column * (width + pad), top + s * (height + pad))
        frames.append(frame)
    return with_pause(np.stack(frames))


def headline_of(key: str, context: int, horizon: int) -> str:
    steps = "1 step" if context == 1 else f"{context} steps"
    return f"The model saw {steps} of '{key}', then imagined the next {horizon} with its eyes closed"


def mark(banner: Any, step: int, context: int) -> None:
    """The sign that says whether the model sees or imagines at this step."""
    observing = step < context
    text = f"OBSERVING   step {step + 1} of {context}" if observing else f"IMAGINING   {step - context + 1} steps ahead"
    banner.set_text(text.replace(" 1 steps", " 1 step"))
    colour = OBSERVED if observing else IMAGINED
    banner.set_bbox({"boxstyle": "round,pad=0.45", "facecolor": colour, "edgecolor": "none"})


def grab(figure: Any) -> np.ndarray:
    """The figure's pixels as they are drawn now."""
    with style():
        figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def with_pause(frames: np.ndarray, hold: int = 8) -> np.ndarray:
    """Let the last frame stand for a moment before the video starts again."""
    return np.concatenate([frames, np.repeat(frames[-1:], hold, axis=0)])


def chosen_steps(steps: int, context: int) -> list[int]:
    """The columns of the strip: the last observed steps, then imagined ones from the first to the last."""
    seen = min(context, 3)
    room = MAX_COLUMNS - seen
    ahead = steps - context
    if ahead <= room:
        return [*range(context - seen, steps)]
    return [*range(context - seen, context), *np.linspace(context, steps - 1, room).round().astype(int).tolist()]


def step_label(step: int, context: int) -> str:
    ahead = step - (context - 1)
    return "last seen" if ahead == 0 else f"{ahead:+d}".replace("-", "\N{MINUS SIGN}")


def unit_images(images: np.ndarray) -> np.ndarray:
    """uint8 or float images as float32 from 0 to 1."""
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255.0)
    return np.clip(np.nan_to_num(images.astype(np.float32)), 0.0, 1.0)


def _cells(real: np.ndarray, imagined: np.ndarray, size: int) -> np.ndarray:
    """uint8 RGB [sequence, time, 3 (real, imagined, difference), height, width, 3], scaled to about `size` pixels."""
    real, imagined = rgb(unit_images(real)), rgb(unit_images(imagined))
    brightest = float(real.max())
    if 0.0 < brightest < 0.25:  # symbolic images (MiniGrid's codes 0 to 10, say) would be black
        real, imagined = real / brightest, np.clip(imagined / brightest, 0.0, 1.0)
    difference = np.abs(real - imagined).mean(-1, keepdims=True)
    # Light grey: no difference; the error colour at a quarter of the full scale and beyond.
    strength = np.clip(4.0 * difference, 0.0, 1.0)
    same, wrong = np.float32(0.95), np.array([0.77, 0.20, 0.13], np.float32)
    coloured = same + strength * (wrong - same)
    stacked = np.stack([real, imagined, coloured], axis=2)
    return resize((255.0 * stacked).round().astype(np.uint8), size)


def rgb(images: np.ndarray) -> np.ndarray:
    """The newest frame of a stack, as three channels."""
    channels = images.shape[-1]
    return images[..., -3:] if channels % 3 == 0 else np.repeat(images[..., -1:], 3, axis=-1)


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Scale [..., height, width, 3] so that the longer side has `size` pixels; pixels stay sharp when enlarged."""
    from PIL import Image

    height, width = images.shape[-3:-1]
    factor = size / max(height, width)
    target = (max(1, round(width * factor)), max(1, round(height * factor)))
    method = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BOX
    flat = images.reshape(-1, height, width, 3)
    resized = np.stack([np.asarray(Image.fromarray(image).resize(target, method)) for image in flat])
    return resized.reshape(*images.shape[:-3], target[1], target[0], 3)


def canvas(width: int, height: int) -> Any:
    """Axes whose unit is one pixel, top left the origin."""
    figure = new_figure(width / DPI, height / DPI, dpi=DPI, arranged=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_autoscale_on(False)
    return axes


def paste(frame: np.ndarray, cell: np.ndarray, x: int, y: int) -> None:
    """Put a picture at its place, pixel by pixel."""
    frame[y : y + cell.shape[0], x : x + cell.shape[1]] = cell


def save_picture(path: Path, picture: np.ndarray) -> Path:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path, optimize=True)
    return path


def _bar(axes: Any, start: float, end: float, y: float, colour: str, texts: tuple[str, ...]) -> None:
    """A coloured bar with the first text that fits into it."""
    axes.fill_between([start, end], y, y + 18, color=colour, lw=0)
    text = next((text for text in texts if 6.5 * len(text) < end - start), texts[-1])
    axes.text((start + end) / 2, y + 9.5, text, ha="center", va="center", fontsize=8, color="white")

"""Rows of labelled images and films that a workflow makes of its model, as files."""

from __future__ import annotations

import json
from pathlib import Path

from rl_lab.metrics.charts import literal
from rl_lab.metrics.imagination_images import INK, canvas, grab, paste, resize, rgb, save_picture
from rl_lab.metrics.video import write_video
from rl_lab.records import Illustration

GAP, LEFT, TOP, HEAD = 4, 78, 34, 14  # pixels
LIST = "illustrations.json"


def write_illustrations(illustrations: list[Illustration], folder: Path, *, fps: float = 20.0) -> list[Path]:
    """Each as <name>.png and, where it has a film, <name>.mp4; illustrations.json says what they show."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, files = [], []
    for item in illustrations:
        picture = _draw(item, folder / f"{item.name}.png")
        entry = {"title": item.title, "text": item.text, "picture": picture.name}
        files.append(picture)
        if item.film is not None:
            video = write_video(folder / f"{item.name}.mp4", rgb(item.film), fps)
            entry["video"] = video.name
            files.append(video)
        entries.append(entry)
    target = folder / LIST
    target.write_text(json.dumps(entries, indent=1) + "\n")
    return [*files, target]


def _draw(item: Illustration, path: Path) -> Path:
    """The rows below each other, their labels at the left, those of columns and the title above."""
    columns, top = max(len(images) for _, images in item.rows), TOP + HEAD * bool(item.columns)
    width, height = LEFT + columns * (item.cell + GAP) + 8, top + len(item.rows) * (item.cell + GAP) + 4
    axes = canvas(width, height)
    axes.text(8, 18, literal(item.title), fontsize=10, weight="bold", va="center", color=INK)
    for column, label in enumerate(item.columns):
        x = LEFT + column * (item.cell + GAP) + item.cell / 2
        axes.text(x, top - HEAD / 2, literal(label), fontsize=8, ha="center", va="center", color=INK)
    for row, (label, _) in enumerate(item.rows):
        y = top + row * (item.cell + GAP) + item.cell / 2
        axes.text(LEFT - 8, y, literal(label), fontsize=8, ha="right", va="center", color=INK)
    picture = grab(axes.figure)
    for row, (_, images) in enumerate(item.rows):
        for column, cell in enumerate(resize(rgb(images), item.cell)):
            paste(picture, cell, LEFT + column * (item.cell + GAP), top + row * (item.cell + GAP))
    return save_picture(path, picture)

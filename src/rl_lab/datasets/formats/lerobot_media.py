"""Pictures and videos of LeRobot's datasets as columns that are decoded when they are asked for."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.datasets.formats.base import unreadable


class PictureColumn:
    """Encoded pictures in a table, or paths of picture files."""

    dtype = np.dtype(np.uint8)

    def __init__(self, folder: Path, name: str, column: Any, shape: tuple[int, ...]) -> None:
        self._folder, self._name, self._column = folder, name, column
        self.shape = (len(column), *shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        from PIL import Image

        pictures = []
        start, stop, _ = rows.indices(self.shape[0])
        for row in range(start, stop):
            entry = self._column[row].as_py()
            try:
                source: Any = io.BytesIO(entry["bytes"]) if entry.get("bytes") else self._folder / entry["path"]
                picture = np.asarray(Image.open(source))
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise unreadable(self._folder, error, f"{self._name}' in row '{row}") from error
            pictures.append(picture if picture.ndim == 3 else picture[..., None])
        return np.stack(pictures) if pictures else np.zeros((0, *self.shape[1:]), np.uint8)


@dataclass(frozen=True)
class VideoPart:
    """Rows of a table whose frames are in one file, from frame `first` on."""

    start: int
    stop: int
    path: Path
    first: int


class VideoColumn:
    """Frames, decoded by ffmpeg; a slice must lie within one episode."""

    dtype = np.dtype(np.uint8)

    def __init__(self, parts: list[VideoPart], shape: tuple[int, ...]) -> None:
        self._parts = parts
        self.shape = (parts[-1].stop if parts else 0, *shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        import imageio.v3 as imageio

        start, stop, _ = rows.indices(self.shape[0])
        part = next(part for part in self._parts if part.start <= start < part.stop)
        first = part.first + start - part.start
        try:
            frames = list(islice(imageio.imiter(part.path, plugin="FFMPEG"), first, first + stop - start))
        except (OSError, ValueError, RuntimeError) as error:
            raise unreadable(part.path, error) from error
        if len(frames) < stop - start:
            raise unreadable(part.path, ValueError(f"it ends with frame {first + len(frames)}"))
        return np.stack(frames)

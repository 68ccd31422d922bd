"""Images as the agent sees them: uint8, height × width × channels, resized and grey where asked."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

SMALLEST_IMAGE = 32  # a smaller uint8 grid is symbolic (MiniGrid), not a picture
MOST_CHANNELS = 16


def image_layout(shape: tuple[int, ...]) -> str | None:
    """The layout of a picture in a rank 2 or 3 array: `hw`, `hwc`, `chw`; None where it does not look like one."""
    if len(shape) == 2 and min(shape) >= SMALLEST_IMAGE:
        return "hw"
    if len(shape) != 3:
        return None
    if shape[2] <= MOST_CHANNELS and min(shape[:2]) >= SMALLEST_IMAGE:
        return "hwc"
    if shape[0] <= MOST_CHANNELS and min(shape[1:]) >= SMALLEST_IMAGE:
        return "chw"
    return None


class ImageTransform:
    """Turns one picture of a fixed source layout into the agent's uint8 picture."""

    def __init__(self, shape: tuple[int, ...], *, layout: str, scale: float, size: int | None, grayscale: bool) -> None:
        height, width, channels = _hwc(shape, layout)
        self._layout, self._scale = layout, scale
        self._gray = grayscale and channels == 3
        self._size = size if size is not None and (size, size) != (height, width) else None
        channels = 1 if self._gray else channels
        self.source = f"{height}×{width}"
        self.shape = (height, width, channels) if self._size is None else (self._size, self._size, channels)

    @property
    def resizes(self) -> bool:
        return self._size is not None

    def __call__(self, raw: np.ndarray) -> np.ndarray:
        image = np.asarray(raw)
        if self._layout == "chw":
            image = np.moveaxis(image, 0, -1)
        elif self._layout == "hw":
            image = image[..., None]
        if image.dtype != np.uint8:
            image = np.clip(np.rint(image * self._scale), 0, 255).astype(np.uint8)
        if self._gray or self._size is not None:
            image = self._pillow(np.ascontiguousarray(image))
        return image

    def _pillow(self, image: np.ndarray) -> np.ndarray:
        if image.shape[-1] not in (1, 3):  # stacked frames and the like: Pillow knows one and three channels
            return np.stack([self._resize(Image.fromarray(image[..., i])) for i in range(image.shape[-1])], -1)
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        if self._gray:
            picture = picture.convert("L")  # luminance: 0.299 R + 0.587 G + 0.114 B
        result = self._resize(picture)
        return result[..., None] if result.ndim == 2 else result

    def _resize(self, picture: Image.Image) -> np.ndarray:
        if self._size is not None:
            picture = picture.resize((self._size, self._size), Image.Resampling.BILINEAR)
        return np.asarray(picture)


def _hwc(shape: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    if layout == "hw":
        return shape[0], shape[1], 1
    if layout == "chw":
        return shape[1], shape[2], shape[0]
    return shape[0], shape[1], shape[2]


def to_picture(frame: Any) -> np.ndarray | None:
    """A rendered frame as bytes [height, width, 3]: floats up to 1 or up to 255, grey, and colour with transparency are
    converted. None where it is no picture."""
    if not isinstance(frame, np.ndarray) or frame.size == 0 or frame.dtype.kind not in "biuf":
        return None
    if frame.ndim == 2:
        frame = frame[..., None]
    if frame.ndim != 3 or frame.shape[-1] not in (1, 3, 4):
        return None
    if frame.dtype != np.uint8:
        values = np.nan_to_num(frame.astype(np.float64))
        values = values * 255.0 if values.max() <= 1.0 else values
        frame = np.clip(values, 0.0, 255.0).astype(np.uint8)
    return np.repeat(frame, 3, axis=-1) if frame.shape[-1] == 1 else np.ascontiguousarray(frame[..., :3])

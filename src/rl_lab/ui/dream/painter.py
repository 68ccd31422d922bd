"""Observations as pictures: images as they are, vectors drawn by the environment's own renderer where it can be set."""

from __future__ import annotations

import contextlib
import io
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from rl_lab.environments.factory import build_environment
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.metrics.imagination_images import unit_images
from rl_lab.records import Observation
from rl_lab.simulation.classic_control import TASKS
from rl_lab.specs import ObservationSpec

RAW_PIXELS = 128  # images up to this size travel as they are; larger ones as JPEG
LARGEST = 420  # pixels of a picture's longer side
QUALITY = 88
TOLERANCE = 1e-3  # between an observation and the one that a renderer shows after it was set to it


class Painter(Protocol):
    def paint(self, observation: Observation) -> np.ndarray | None:
        """An RGB picture of an observation, or None."""


class ImagePainter:
    """Shows the image of an observation; of several stacked frames the last."""

    def __init__(self, key: str) -> None:
        self.key = key

    def paint(self, observation: Observation) -> np.ndarray | None:
        image = observation.get(self.key)
        if image is None:
            return None
        image = (unit_images(image) * 255.0).round().clip(0, 255).astype(np.uint8)
        channels = image.shape[-1]
        if channels % 3 == 0:
            return np.ascontiguousarray(image[..., -3:])
        return np.repeat(image[..., -1:], 3, -1)


class StatePainter:
    """Puts an environment of its own into the state that shows an observation, and lets it draw itself."""

    def __init__(self, settings: EnvironmentSettings, key: str) -> None:
        self.key = key
        self.env = build_environment(settings.resolved().for_evaluation(), render=True).env
        self.env.reset(seed=0)
        self.inner: Any = self.env.unwrapped
        self.task = TASKS[settings.id]() if settings.id in TASKS else None

    def can_show(self, observation: Observation) -> bool:
        """Whether the environment, set to this observation, would be seen as this observation."""
        vector = observation.get(self.key)
        if vector is None or vector.ndim != 1:
            return False
        with contextlib.suppress(Exception):  # whatever a foreign environment objects to, there are traces
            self._set(vector)
            shown = self.task.encode(self._state(vector)).numpy() if self.task else self.inner._get_obs()
            picture = self.env.render()
            return np.allclose(shown, vector, atol=TOLERANCE) and isinstance(picture, np.ndarray) and picture.ndim == 3
        return False

    def paint(self, observation: Observation) -> np.ndarray | None:
        vector = observation.get(self.key)
        if vector is None or not np.isfinite(vector).all():
            return None
        self._set(vector)
        picture: Any = self.env.render()
        return picture

    def _state(self, vector: np.ndarray) -> torch.Tensor:
        assert self.task is not None
        return self.task.decode(torch.as_tensor(vector, dtype=torch.float64))

    def _set(self, vector: np.ndarray) -> None:
        if self.task is not None:
            self.inner.state = self._state(vector).numpy()
            if hasattr(self.inner, "last_u"):
                self.inner.last_u = None  # the arrow of the last torque
            return
        position, velocity = self.inner.model.nq, self.inner.model.nv
        unseen = position + velocity - len(vector)  # MuJoCo tasks hide where the body is along its way
        if not 0 <= unseen <= 2:
            raise ValueError("the observation is not the state")
        vector = np.asarray(vector, np.float64)
        self.inner.set_state(
            np.concatenate([np.zeros(unseen), vector[: position - unseen]]), vector[position - unseen :]
        )


def painter_for(
    settings: EnvironmentSettings, spec: dict[str, ObservationSpec], example: Observation
) -> ImagePainter | StatePainter | None:
    """The painter of the first image; else the environment's renderer where it can be set; else None: traces."""
    images = [key for key, own in spec.items() if own.kind == "image"]
    if images:
        return ImagePainter(images[0])
    vectors = [key for key, own in spec.items() if own.kind == "vector"]
    if len(vectors) != 1:
        return None
    try:
        painter = StatePainter(settings, vectors[0])
    except Exception:  # it cannot be drawn: traces tell
        return None
    return painter if painter.can_show(example) else None


def packed(picture: np.ndarray | None) -> tuple[dict[str, Any], bytes] | None:
    """A picture for the wire: its description and its bytes."""
    if picture is None:
        return None
    height, width = picture.shape[:2]
    if max(height, width) <= RAW_PIXELS:
        return {"kind": "rgb", "width": width, "height": height}, np.ascontiguousarray(picture).tobytes()
    image = Image.fromarray(picture)
    if max(height, width) > LARGEST:
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.BILINEAR, reducing_gap=1.0)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return {"kind": "jpeg", "width": image.width, "height": image.height}, buffer.getvalue()

"""What every image network starts with."""

from __future__ import annotations

from jaxtyping import Float, UInt8
from torch import Tensor

from rl_lab.nn.math import compute_dtype


def scale_image(image: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """uint8 0..255 → -0.5..0.5, in the dtype that the convolutions will run in (bfloat16 holds 0..255 exactly)."""
    return image.to(compute_dtype(image.device)) / 255.0 - 0.5


def flatten_lead(image: Tensor) -> Tensor:
    """[*lead, height, width, channels] → [rows, height, width, channels]."""
    return image.reshape(-1, *image.shape[-3:])

"""Preprocessing of images, shared by the image networks."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import compute_dtype


def scale_image(image: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """uint8 0..255 → -0.5..0.5, in the dtype that the convolutions will run in (bfloat16 holds 0..255 exactly). Floats
    are scaled already."""
    scaled = image.to(compute_dtype(image.device))
    return scaled if image.is_floating_point() else scaled / 255.0 - 0.5


def flatten_lead(image: Tensor) -> Tensor:
    """[*lead, height, width, channels] → [rows, height, width, channels]."""
    return image.reshape(-1, *image.shape[-3:])


class QuantizedImages(nn.Module):
    """PlaNet's images: floor(x / 2^(8-bits)) / 2^bits + U(0, 1/2^bits) - 0.5, by key; other keys are left as they are.

    Fewer bits make the model spend its capacity on large things; the noise stands for the lost bits. The same noisy
    image is what the encoder sees and what the decoder must explain.
    """

    def __init__(self, *, bits: int = 5) -> None:
        super().__init__()
        if not 1 <= bits <= 8:
            raise ConfigError(f"bits={bits}: expected 1 to 8.")
        self.bits = bits

    def forward(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: self._quantized(x) if x.dtype == torch.uint8 else x for key, x in observation.items()}

    def _quantized(self, image: Tensor) -> Tensor:
        levels = 2**self.bits
        whole = (image >> (8 - self.bits)).float()
        return (whole + torch.rand_like(whole)) / levels - 0.5

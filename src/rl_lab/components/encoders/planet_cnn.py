"""The image encoder of PlaNet, Dreamer v1 and v2."""

from __future__ import annotations

from itertools import pairwise

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead, scale_image
from rl_lab.errors import ConfigError
from rl_lab.nn.convolutions import StridedConv, glorot_conv_
from rl_lab.nn.styles import StyleLike, layer_style

IMAGE_SIZE = 64  # the only one that the decoder's kernels lead back to


class PlanetCNN(nn.Module):
    """Four convolutions of kernel 4 and stride 2 without padding, with depth·(1, 2, 4, 8) channels and an activation
    each, then flatten: 64×64 → 31 → 14 → 6 → 2×2×8·depth. `depth` is 32 in PlaNet and Dreamer v1, 48 in v2."""

    shrinks_by = IMAGE_SIZE

    def __init__(self, *, height: int, width: int, channels: int, depth: int = 32, style: StyleLike = "planet") -> None:
        super().__init__()
        require_64(height, width)
        look = layer_style(style)
        if look.norm != "none":
            raise ConfigError(
                f"image_encoder=planet has no norms, but the style has norm={look.norm}. Give it style=planet, "
                "dreamer_v1 or dreamer_v2, or take image_encoder=dreamer."
            )
        widths = [channels, *(depth * 2**layer for layer in range(4))]
        self.convs = nn.ModuleList(
            glorot_conv_(StridedConv(*pair, kernel=4) if layer == 0 else nn.Conv2d(*pair, 4, stride=2))
            for layer, pair in enumerate(pairwise(widths))
        )
        self.activate = look.activate
        self.output_size = 4 * widths[-1]

    def forward(self, image: Shaped[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        """uint8, or floats that are scaled already."""
        x = scale_image(flatten_lead(image)).permute(0, 3, 1, 2)
        for conv in self.convs:
            x = self.activate(conv(x))
        return x.flatten(1).reshape(*image.shape[:-3], self.output_size)


def require_64(height: int, width: int) -> None:
    if (height, width) != (IMAGE_SIZE, IMAGE_SIZE):
        raise ConfigError(
            f"PlaNet's image networks are made for 64×64 images; these are {height}×{width}. Set "
            "environment.image_size=64, or take image_encoder=dreamer and image_decoder=dreamer."
        )

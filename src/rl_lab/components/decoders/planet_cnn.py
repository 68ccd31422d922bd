"""The image decoder of PlaNet, Dreamer v1 and v2."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.components.encoders.planet_cnn import require_64
from rl_lab.nn.convolutions import StridedDeconv, glorot_conv_
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.layers import Linear
from rl_lab.nn.styles import StyleLike, layer_style

KERNELS = (5, 5, 6, 6)


class PlanetCNNDecoder(nn.Module):
    """A linear layer to 1×1×32·depth, then transposed convolutions of stride 2 with kernels 5, 5, 6, 6 and depth·(4, 2,
    1) channels, the activation between them. The prediction is the mean of a unit normal over images in -0.5..0.5."""

    def __init__(
        self, *, deter: int, stoch_size: int, height: int, width: int, channels: int, depth: int = 32,
        style: StyleLike = "planet",
    ) -> None:  # fmt: skip
        super().__init__()
        require_64(height, width)
        look = layer_style(style)
        self.dense = Linear(deter + stoch_size, 32 * depth, init=look.init)
        widths = [32 * depth, 4 * depth, 2 * depth, depth, channels]
        self.convs = nn.ModuleList(
            glorot_conv_(
                StridedDeconv(*pair, kernel=kernel) if layer == 3 else nn.ConvTranspose2d(*pair, kernel, stride=2)
            )
            for layer, (pair, kernel) in enumerate(zip(pairwise(widths), KERNELS, strict=True))
        )
        self.activate = look.activate

    def forward(
        self, deter: Float[Tensor, "*lead deter"], stoch: Float[Tensor, "*lead stoch"]
    ) -> Float[Tensor, "*lead height width channels"]:
        features = torch.cat([deter, stoch.to(deter.dtype)], -1)
        x = self._first(self.dense(features.reshape(-1, features.shape[-1])))
        for conv in self.convs[1:]:
            x = conv(self.activate(x))
        return at_least_float32(x.permute(0, 2, 3, 1)).reshape(*deter.shape[:-1], *x.shape[2:], x.shape[1])

    def _first(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs 5 5"]:
        """A transposed convolution of a single pixel is a product. As a convolution its result's layout is ambiguous,
        and compiled code guesses another one than the GPU library takes."""
        conv, kernel = self.convs[0], KERNELS[0]
        assert isinstance(conv, nn.ConvTranspose2d)
        assert conv.bias is not None
        weight, bias = conv.weight.flatten(1).t(), conv.bias.repeat_interleave(kernel * kernel)
        image = F.linear(x, weight, bias).unflatten(-1, (-1, kernel, kernel))
        return image.contiguous(memory_format=torch.channels_last)

    def loss(
        self, prediction: Float[Tensor, "*lead height width channels"],
        image: Shaped[Tensor, "*lead height width channels"],
    ) -> Float[Tensor, "*lead"]:  # fmt: skip
        """-log N(x | prediction, 1) without its constant, summed over the image: half the squared error."""
        target = image if image.is_floating_point() else image.to(prediction.dtype) / 255.0 - 0.5
        return 0.5 * (prediction - target.to(prediction.dtype)).square().sum((-3, -2, -1))

    def decode(self, prediction: Float[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """In 0..255."""
        return ((prediction + 0.5) * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)

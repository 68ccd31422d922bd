"""DreamerV3's image decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.kernels.registry import Accelerated
from rl_lab.nn.convolutions import UpsampleConv
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.layers import BlockLinear, Linear, NormedLinear, RMSNorm

SHRINKS_BY = 16


class DreamerCNNDecoder(Accelerated):
    """From (deter, stoch) to an image in 0..1.

    A small map of 4·depth channels is the sum of a block layer of the deterministic state (each block owns the same
    channels at every place) and a small MLP of the stochastic one. Then four times: double the size, 5×5 convolution.
    """

    def __init__(
        self, *, deter: int, stoch_size: int, height: int, width: int, channels: int,
        depth: int = 16, units: int = 256, blocks: int = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        widths = [4 * depth, 4 * depth, 3 * depth, 2 * depth]
        if widths[0] % blocks:
            raise ConfigError(
                f"depth={depth}: the image decoder shares 4·depth = {widths[0]} channels among {blocks} blocks. "
                f"Choose a depth for which 4·depth is a multiple of {blocks}."
            )
        self.map_shape = (height // SHRINKS_BY, width // SHRINKS_BY, widths[0])
        self.blocks = blocks
        size = self.map_shape[0] * self.map_shape[1] * widths[0]
        self.from_deter = BlockLinear(deter, size, blocks)
        self.from_stoch = nn.Sequential(NormedLinear(stoch_size, 2 * units), Linear(2 * units, size))
        self.map_norm = RMSNorm(widths[0])
        self.convs = nn.ModuleList(
            UpsampleConv(inputs, outputs) for inputs, outputs in zip(widths, [*widths[1:], channels], strict=True)
        )
        self.norms = nn.ModuleList(RMSNorm(outputs) for outputs in widths[1:])

    def forward(
        self, deter: Float[Tensor, "*lead deter"], stoch: Float[Tensor, "*lead stoch"]
    ) -> Float[Tensor, "*lead height width channels"]:
        x = self.small_map(deter.reshape(-1, deter.shape[-1]), stoch.reshape(-1, stoch.shape[-1]))
        for conv, norm in zip(self.convs, [*self.norms, None], strict=True):
            x = conv(x)
            x = F.silu(norm(x)) if norm is not None else x
        return torch.sigmoid(at_least_float32(x)).reshape(*deter.shape[:-1], *x.shape[1:])

    def small_map(self, deter: Float[Tensor, "rows deter"], stoch: Float[Tensor, "rows stoch"]) -> Tensor:
        """[rows, height/16, width/16, 4·depth]."""
        height, width, channels = self.map_shape
        inputs = deter.view(-1, self.blocks, deter.shape[-1] // self.blocks).transpose(0, 1)
        blocks = self.from_deter.forward_blocks(inputs).view(self.blocks, -1, height, width, channels // self.blocks)
        placed = blocks.permute(1, 2, 3, 0, 4).reshape(-1, height, width, channels)
        return F.silu(self.map_norm(placed + self.from_stoch(stoch).view_as(placed)))

    def loss(
        self, prediction: Float[Tensor, "*lead height width channels"],
        image: UInt8[Tensor, "*lead height width channels"],
    ) -> Float[Tensor, "*lead"]:  # fmt: skip
        """Squared error of values in 0..1, summed over the image (no 1/2)."""
        return (prediction - image.to(prediction.dtype) / 255.0).square().sum((-3, -2, -1))

    def image_loss(
        self, deter: Float[Tensor, "*lead deter"], stoch: Float[Tensor, "*lead stoch"],
        image: UInt8[Tensor, "*lead height width channels"],
    ) -> Float[Tensor, "*lead"]:  # fmt: skip
        """`loss` of the image that `forward` predicts."""
        if self.kernels and (kernel := self.kernel("image_loss")) is not None:
            return kernel(self, deter, stoch, image)
        return self.loss(self(deter, stoch), image)

    def decode(self, prediction: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
        """In 0..255."""
        return (prediction * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)

"""Convolutions of stride 2 between images and features, in a form that a GPU is fast at.

An image has few channels, for which a GPU has no fast convolution. So there, every 2×2 pixels become the channels of
one: what had stride 2 and an even kernel is, exactly, a convolution of half the kernel without a stride.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.nn.layers import spare_channels


class StridedConv(nn.Conv2d):
    """From an image of even size, without padding."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        assert kernel % 2 == 0
        super().__init__(in_channels, out_channels, kernel, stride=2)

    def forward(self, x: Float[Tensor, "rows inputs height width"]) -> Float[Tensor, "rows outputs height2 width2"]:
        return self.by_phases(x) if x.is_cuda else super().forward(x)

    def by_phases(self, x: Float[Tensor, "rows inputs height width"]) -> Float[Tensor, "rows outputs height2 width2"]:
        rows, inputs, height, width = x.shape
        taps, spare = self.kernel_size[0] // 2, spare_channels(x, 4 * inputs)
        x = x.permute(0, 2, 3, 1).reshape(rows, height // 2, 2, width // 2, 2, inputs).permute(0, 1, 3, 2, 4, 5)
        x = F.pad(x.reshape(rows, height // 2, width // 2, 4 * inputs), (0, spare))
        weight = self.weight.view(-1, inputs, taps, 2, taps, 2).permute(0, 3, 5, 1, 2, 4)
        weight = F.pad(weight.reshape(-1, 4 * inputs, taps, taps), (0, 0, 0, 0, 0, spare))
        return F.conv2d(x.permute(0, 3, 1, 2), weight.contiguous(memory_format=torch.channels_last), self.bias)


class StridedDeconv(nn.ConvTranspose2d):
    """To an image, transposed: without padding."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        assert kernel % 2 == 0
        super().__init__(in_channels, out_channels, kernel, stride=2)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "rows inputs height width"]
    ) -> Float[Tensor, "rows outputs height2 width2"]:
        return self.by_phases(x) if x.is_cuda else super().forward(x)

    def by_phases(self, x: Float[Tensor, "rows inputs height width"]) -> Float[Tensor, "rows outputs height2 width2"]:
        assert self.bias is not None
        inputs, outputs, taps = self.in_channels, self.out_channels, self.kernel_size[0] // 2
        spare = spare_channels(x, 4 * outputs)
        # The pixel 2i + p of the result meets pixel i - k with weight 2k + p.
        weight = self.weight.view(inputs, outputs, taps, 2, taps, 2).flip(2, 4).permute(3, 5, 1, 0, 2, 4)
        weight = F.pad(weight.reshape(4 * outputs, inputs, taps, taps), (0, 0, 0, 0, 0, 0, 0, spare))
        bias = F.pad(self.bias.repeat(4), (0, spare))
        weight = weight.contiguous(memory_format=torch.channels_last)
        phases = F.conv2d(x, weight, bias, padding=taps - 1).permute(0, 2, 3, 1)
        rows, height, width, _ = phases.shape
        parts = phases[..., : 4 * outputs].reshape(rows, height, width, 2, 2, outputs).permute(0, 1, 3, 2, 4, 5)
        return parts.reshape(rows, 2 * height, 2 * width, outputs).permute(0, 3, 1, 2)

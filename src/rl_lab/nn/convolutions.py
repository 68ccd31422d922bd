"""Convolutions of image networks, in forms that a GPU is fast at.

An image has few channels, for which a GPU has no fast convolution. So there, every 2×2 pixels become the channels of
one: a 5×5 convolution with pooling or up-sampling, or one of stride 2 with an even kernel, is then, exactly, a smaller
convolution without a stride.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.nn.layers import init_averaged_, init_weight_

Convolution = TypeVar("Convolution", nn.Conv2d, nn.ConvTranspose2d)


class Conv(nn.Conv2d):
    """A convolution with bias that keeps the image size at stride 1 (odd kernels)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, outscale: float = 1.0
    ) -> None:
        self.outscale = outscale
        super().__init__(in_channels, out_channels, kernel, stride=stride, padding=(kernel - 1) // 2)

    def reset_parameters(self) -> None:
        fan_in = self.in_channels * self.kernel_size[0] * self.kernel_size[1]
        init_weight_(self.weight, fan_in=fan_in, outscale=self.outscale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _taps() -> Tensor:
    """[2, 3, 2, 5]: an output pixel of this phase (even or odd) meets the pixel of that phase, in the left, the same or
    the right one of the pairs, with which of the five weights of a 5×5 convolution."""
    along = torch.zeros(2, 3, 2, 5)
    for phase in range(2):
        for tap in range(5):
            place = phase + tap - 2
            along[phase, place // 2 + 1, place % 2, tap] = 1.0
    return along


class UpsampleConv(Conv):
    """Nearest-neighbour upsampling by 2, then a 5×5 convolution; images are [rows, height, width, channels].

    Of the 25 inputs of an output pixel only 3×3 are different ones. So this is computed, exactly, as a 3×3 convolution
    of the small image to four outputs per pixel, with sums of the 5×5 weights: a third of the work.
    """

    taps: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 5)
        along = _taps().sum(2)  # both pixels of a pair are the same one
        taps = torch.einsum("pah,qbw->hwpqab", along, along).reshape(25, 36)
        self.register_buffer("taps", taps, persistent=False)

    def forward(self, x: Float[Tensor, "rows height width inputs"]) -> Float[Tensor, "rows height2 width2 outputs"]:
        assert self.bias is not None
        rows, height, width, inputs = x.shape
        weight = (self.weight.flatten(2) @ self.taps).view(-1, inputs, 4, 3, 3)
        weight = weight.permute(2, 0, 1, 3, 4).reshape(-1, inputs, 3, 3)
        bias, spare = self.bias.repeat(4), spare_channels(x, 4 * self.out_channels)
        if spare:
            weight, bias = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, spare)), F.pad(bias, (0, spare))
        weight = weight.contiguous(memory_format=torch.channels_last)
        phases = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1).permute(0, 2, 3, 1)
        parts = phases[..., : 4 * self.out_channels].reshape(rows, height, width, 2, 2, self.out_channels)
        return parts.permute(0, 1, 3, 2, 4, 5).reshape(rows, 2 * height, 2 * width, self.out_channels)


class PooledConv(Conv):
    """A 5×5 convolution, then 2×2 max-pooling; images are [rows, height, width, channels].

    An image has few channels, for which a GPU has no fast convolution. So there this is computed, exactly, as a 3×3
    convolution of the image with every 2×2 pixels as channels of one, to four outputs: their largest is the result.
    """

    taps: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 5)
        self.register_buffer("taps", torch.einsum("pash,qbrw->hwpqsrab", _taps(), _taps()).reshape(25, -1), False)

    def forward(self, x: Float[Tensor, "rows height width inputs"]) -> Float[Tensor, "rows height2 width2 outputs"]:
        if x.is_cuda:
            return self.by_phases(x)
        return F.max_pool2d(super().forward(x.permute(0, 3, 1, 2)), 2).permute(0, 2, 3, 1)

    def by_phases(self, x: Float[Tensor, "rows height width inputs"]) -> Float[Tensor, "rows height2 width2 outputs"]:
        assert self.bias is not None
        rows, height, width, inputs = x.shape
        spare = spare_channels(x, 4 * inputs)
        x = x.reshape(rows, height // 2, 2, width // 2, 2, inputs).permute(0, 1, 3, 2, 4, 5)
        x = F.pad(x.reshape(rows, height // 2, width // 2, 4 * inputs), (0, spare))
        weight = (self.weight.flatten(2) @ self.taps).view(-1, inputs, 4, 4, 3, 3)
        weight = weight.permute(2, 0, 3, 1, 4, 5).reshape(-1, 4 * inputs, 3, 3)
        weight = F.pad(weight, (0, 0, 0, 0, 0, spare)).contiguous(memory_format=torch.channels_last)
        phases = F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1)
        phases = phases.unflatten(-1, (4, self.out_channels))
        # Of equal ones the first gets the gradient, as in max-pooling.
        largest = phases.detach().argmax(-2, keepdim=True).to(torch.uint8)
        others = largest != torch.arange(4, dtype=torch.uint8, device=x.device).unsqueeze(-1)
        return phases.masked_fill(others, 0.0).sum(-2, dtype=phases.dtype) + self.bias.to(phases.dtype)


def spare_channels(x: Tensor, channels: int) -> int:
    """The number of channels to add: tensor cores want multiples of eight."""
    return -channels % 8 if x.is_cuda else 0


def glorot_conv_(layer: Convolution) -> Convolution:
    """Fill a plain (transposed) convolution in place: Glorot-uniform weights, no bias at first."""
    area = layer.kernel_size[0] * layer.kernel_size[1]
    init_averaged_(layer.weight, fans=(area * layer.in_channels, area * layer.out_channels), uniform=True)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


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

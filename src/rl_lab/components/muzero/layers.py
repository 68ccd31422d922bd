"""Layers that MuZero's networks share: plain MLPs, residual blocks, and the scaling of latents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

TINY = 1e-5  # smallest range of a latent that is divided by


def scale_latent(latent: Float[Tensor, rows * shape]) -> Float[Tensor, rows * shape]:
    """Each row to [0, 1] by its own minimum and maximum, which keeps long unrolls bounded."""
    flat = latent.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp(min=TINY)).view_as(latent)


class MLP(nn.Sequential):
    """Linear layers with LayerNorm (where `norm`) and ReLU between them; the last is linear, and 0 where
    `zero_output`."""

    def __init__(self, sizes: Sequence[int], *, norm: bool = True, zero_output: bool = False) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes[:-1]):
            layers += [nn.Linear(before, after), *([nn.LayerNorm(after)] if norm else []), nn.ReLU()]
        output = nn.Linear(sizes[-2], sizes[-1])
        if zero_output:
            nn.init.zeros_(output.weight)
            nn.init.zeros_(output.bias)
        super().__init__(*layers, output)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions around a skip connection; with `stride` 2 the skip is a convolution of its own."""

    def __init__(self, channels: int, output: int | None = None, *, stride: int = 1) -> None:
        super().__init__()
        output = channels if output is None else output
        self.first = convolution(channels, output, stride=stride)
        self.second = convolution(output, output)
        plain = stride == 1 and output == channels
        self.skip: nn.Module = nn.Identity() if plain else nn.Conv2d(channels, output, 3, stride, 1, bias=False)

    def forward(self, x: Float[Tensor, "rows channels height width"]) -> Float[Tensor, "rows output rows_ columns"]:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.skip(x))


def convolution(channels: int, output: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution and a norm over all channels and places of a row, which needs no statistics of a batch: a search
    sees the same network as an update does."""
    layer = nn.Conv2d(channels, output, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(1, output))


class PlaneHead(nn.Module):
    """A 1×1 convolution to a few channels, then an MLP over all places."""

    def __init__(self, channels: int, places: int, outputs: int, *, depth: int = 16, units: int = 32) -> None:
        super().__init__()
        self.reduce = convolution(channels, depth, kernel=1)
        self.network = MLP([depth * places, units, outputs], zero_output=True)

    def forward(self, x: Float[Tensor, "rows channels height width"]) -> Float[Tensor, "rows outputs"]:
        return self.network(torch.relu(self.reduce(x)).flatten(1))

"""A small residual image encoder."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead, scale_image
from rl_lab.components.encoders.impala import ResidualBlock
from rl_lab.nn.convolutions import Conv
from rl_lab.nn.layers import RMSNorm


class ResNetEncoder(nn.Module):
    """Four stages of stride-2 3×3 convolution → `blocks` residual blocks, channels depth·(1, 2, 4, 4), then flatten."""

    shrinks_by = 16

    def __init__(self, *, height: int, width: int, channels: int, depth: int = 16, blocks: int = 1) -> None:
        super().__init__()
        widths = [depth, 2 * depth, 4 * depth, 4 * depth]
        self.downs = nn.ModuleList(
            Conv(inputs, outputs, 3, stride=2) for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.stages = nn.ModuleList(nn.Sequential(*(ResidualBlock(size) for _ in range(blocks))) for size in widths)
        self.norm = RMSNorm(widths[-1])
        self.output_size = (height // 16) * (width // 16) * widths[-1]

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        x = scale_image(flatten_lead(image)).permute(0, 3, 1, 2)
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
        x = F.silu(self.norm(x.permute(0, 2, 3, 1)))
        return x.reshape(*image.shape[:-3], self.output_size)

"""The image encoder of IMPALA (Espeholt et al., 2018), with RMSNorm and SiLU."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead, scale_image
from rl_lab.nn.convolutions import Conv
from rl_lab.nn.layers import RMSNorm


class ResidualBlock(nn.Module):
    """x + conv(act(conv(act(x)))), with norms before the activations; channels first, channels-last memory."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(channels) for _ in range(2))
        self.convs = nn.ModuleList(Conv(channels, channels, 3) for _ in range(2))

    def forward(self, x: Float[Tensor, "rows channels height width"]) -> Float[Tensor, "rows channels height width"]:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.silu(norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2))
        return x + y


class ImpalaCNN(nn.Module):
    """Three stages of 3×3 convolution → 3×3 max-pool, stride 2 → two residual blocks, then flatten."""

    shrinks_by = 8

    def __init__(self, *, height: int, width: int, channels: int, depth: int = 16) -> None:
        super().__init__()
        widths = [depth, 2 * depth, 2 * depth]
        self.stems = nn.ModuleList(
            Conv(inputs, outputs, 3) for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.stages = nn.ModuleList(nn.Sequential(ResidualBlock(size), ResidualBlock(size)) for size in widths)
        self.norm = RMSNorm(widths[-1])
        self.output_size = (height // 8) * (width // 8) * widths[-1]

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        x = scale_image(flatten_lead(image)).permute(0, 3, 1, 2)
        for stem, stage in zip(self.stems, self.stages, strict=True):
            x = stage(F.max_pool2d(stem(x), 3, stride=2, padding=1))
        x = F.silu(self.norm(x.permute(0, 2, 3, 1)))
        return x.reshape(*image.shape[:-3], self.output_size)

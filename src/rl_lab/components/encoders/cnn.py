"""DreamerV3's image encoder."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead, scale_image
from rl_lab.kernels.registry import Accelerated
from rl_lab.nn.convolutions import Conv, PooledConv
from rl_lab.nn.layers import RMSNorm

CHANNEL_MULTIPLES = (2, 3, 4, 4)


class DreamerCNN(Accelerated):
    """Four times: 5×5 convolution → 2×2 max-pool (or stride 2) → RMSNorm over channels → SiLU, then flatten."""

    shrinks_by = 16  # image sizes must be multiples of this

    def __init__(self, *, height: int, width: int, channels: int, depth: int = 16, strided: bool = False) -> None:
        super().__init__()
        widths = [depth * multiple for multiple in CHANNEL_MULTIPLES]
        stride = 2 if strided else 1
        self.strided, self.image_size = strided, (height, width)
        self.convs = nn.ModuleList(
            PooledConv(inputs, outputs) if first and not strided else Conv(inputs, outputs, 5, stride=stride)
            for first, inputs, outputs in zip([True, *[False] * 3], [channels, *widths], widths, strict=False)
        )
        self.norms = nn.ModuleList(RMSNorm(outputs) for outputs in widths)
        self.output_size = (height // 16) * (width // 16) * widths[-1]

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        if self.kernels and (kernel := self.kernel("forward")) is not None:
            return kernel(self, image)
        x = scale_image(flatten_lead(image))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # Channels last in memory throughout: the permutes are views.
            if isinstance(conv, PooledConv):
                x = conv(x)
            else:
                x = conv(x.permute(0, 3, 1, 2))
                x = (x if self.strided else F.max_pool2d(x, 2)).permute(0, 2, 3, 1)
            x = F.silu(norm(x))
        return x.reshape(*image.shape[:-3], self.output_size)

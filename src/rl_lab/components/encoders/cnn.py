"""DreamerV3's image encoder."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead, scale_image
from rl_lab.nn.fusion import has_triton
from rl_lab.nn.layers import Conv, PooledConv, RMSNorm
from rl_lab.nn.math import compute_dtype

CHANNEL_MULTIPLES = (2, 3, 4, 4)


class DreamerCNN(nn.Module):
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
        self.fused = False

    def fuse(self) -> bool:
        first = self.convs[0]
        self.fused = isinstance(first, PooledConv) and has_triton(first.weight)
        return self.fused

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        if self.fused and image.dtype == torch.uint8:
            x = self._forward_fused(flatten_lead(image), compute_dtype(image.device))
            return x.reshape(*image.shape[:-3], self.output_size)
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

    def rehearse(self, dtype: torch.dtype) -> None:
        first: Any = self.convs[0]
        image = torch.empty(2, *self.image_size, first.in_channels, dtype=torch.uint8, device="meta")
        out = copy.deepcopy(self).to("meta")._forward_fused(image, dtype)
        out.backward(torch.empty_like(out))

    def _forward_fused(
        self, image: UInt8[Tensor, "rows height width channels"], dtype: torch.dtype
    ) -> Float[Tensor, "rows y x features"]:
        """One kernel before and after each convolution."""
        from rl_lab.nn import image_functions as functions

        x = functions.scaled_phases(image, dtype)
        layers: Any = zip(self.convs, self.norms, strict=True)
        for conv, norm in layers:
            if isinstance(conv, PooledConv):
                phases = functions.split_phases(functions.phase_conv(x, conv.weight, pool=True), conv.out_channels)
            else:
                pixels = functions.channels_last_conv(x, conv.weight.to(dtype), padding=2)
                phases = pixels.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 1, 3, 2, 4, 5)
            x = functions.pooled_norm_silu(phases, conv.bias, norm.weight, eps=norm.eps)
        return x

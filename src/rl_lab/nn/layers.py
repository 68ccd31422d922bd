"""Layers as DreamerV3 initialises and normalises them, and in the styles of its predecessors.

Weights are drawn from a normal truncated at ±2σ with σ = 1.1368·sqrt(1/fan_in)·outscale (`fan_in`), from torch's global
generator; biases start at 0 and norm scales at 1. `outscale=0` gives zero weights, so that an output layer starts by
predicting 0. Older versions take the mean of both fans, and outscale as a factor of the variance: `fan_avg` is the
truncated normal, `glorot` the uniform distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.fusion import has_triton
from rl_lab.nn.host_products import affine
from rl_lab.nn.math import at_least_float32, in_float32_on_host, in_full_on_host
from rl_lab.nn.normed_layers import LastLayer, LayerRecord, LayerTensors, normed_layers
from rl_lab.nn.styles import DREAMER_V3, Initialization, LayerStyle

TRUNCATION_GAIN = 1.1368  # brings the standard deviation of the truncated normal back to 1
Convolution = TypeVar("Convolution", nn.Conv2d, nn.ConvTranspose2d)


@torch.no_grad()
def init_weight_(weight: Tensor, *, fan_in: int, outscale: float = 1.0) -> Tensor:
    """Fill a weight in place, as the module's docstring says."""
    if outscale == 0.0:
        return weight.zero_()
    std = TRUNCATION_GAIN * math.sqrt(1.0 / fan_in) * outscale
    return nn.init.trunc_normal_(weight, 0.0, std, -2.0 * std, 2.0 * std)


@torch.no_grad()
def init_averaged_(weight: Tensor, *, fans: tuple[int, int], uniform: bool, outscale: float = 1.0) -> Tensor:
    """Fill a weight in place with the variance outscale / mean(fans)."""
    std = math.sqrt(2.0 * outscale / sum(fans))
    if uniform:
        return weight.uniform_(-math.sqrt(3.0) * std, math.sqrt(3.0) * std)
    return init_weight_(weight, fan_in=1, outscale=std)


class Linear(nn.Linear):
    """A dense layer."""

    def __init__(
        self, in_features: int, out_features: int, *, outscale: float = 1.0, init: Initialization = "fan_in",
        bias: bool = True,
    ) -> None:  # fmt: skip
        self.outscale, self.init = outscale, init
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        if self.init == "fan_in":
            init_weight_(self.weight, fan_in=self.in_features, outscale=self.outscale)
        else:
            fans = (self.in_features, self.out_features)
            init_averaged_(self.weight, fans=fans, uniform=self.init == "glorot", outscale=self.outscale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out_features"]:
        fits = x.shape[-1] == self.in_features  # else torch's own layer says so best
        if torch.is_grad_enabled() or self.bias is None or not (fits and in_full_on_host(x)):
            return super().forward(x)
        return affine(x, self.weight, self.bias)


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
    """How many to add: tensor cores want multiples of eight."""
    return -channels % 8 if x.is_cuda else 0


def glorot_conv_(layer: Convolution) -> Convolution:
    """Fill a plain (transposed) convolution in place: Glorot-uniform weights, no bias at first."""
    area = layer.kernel_size[0] * layer.kernel_size[1]
    init_averaged_(layer.weight, fans=(area * layer.in_channels, area * layer.out_channels), uniform=True)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class BlockLinear(nn.Module):
    """A block-diagonal dense layer: `blocks` independent layers side by side, in one batched product.

    The weights' fan-in is the full input size, so each block starts sqrt(blocks) smaller than a layer of its own would.
    """

    def __init__(self, in_features: int, out_features: int, blocks: int, *, outscale: float = 1.0) -> None:
        super().__init__()
        for name, size in (("input", in_features), ("output", out_features)):
            if size % blocks:
                raise ConfigError(
                    f"BlockLinear: an {name} of {size} cannot be cut into {blocks} equal blocks. "
                    f"Choose sizes that are multiples of {blocks}, or another number of blocks."
                )
        self.in_features, self.out_features, self.blocks, self.outscale = in_features, out_features, blocks, outscale
        self.weight = nn.Parameter(torch.empty(blocks, in_features // blocks, out_features // blocks))
        self.bias = nn.Parameter(torch.zeros(out_features))
        init_weight_(self.weight, fan_in=in_features, outscale=outscale)

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out_features"]:
        """Both sides are block-major: the first 1/blocks of the features is block 0."""
        rows = x.reshape(-1, self.blocks, self.in_features // self.blocks).transpose(0, 1)
        return self.forward_blocks(rows).transpose(0, 1).reshape(*x.shape[:-1], self.out_features)

    def forward_blocks(self, x: Float[Tensor, "blocks rows block_in"]) -> Float[Tensor, "blocks rows block_out"]:
        """The same, where input and output are already one matrix per block."""
        return torch.baddbmm(self.bias.view(self.blocks, 1, -1), x, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, blocks={self.blocks}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + 1e-4) · scale over the last axis; float32 inside, the input's dtype outside."""

    def __init__(self, size: int, *, eps: float = 1e-4) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Over the last axis, with scale and offset; float32 inside, the input's dtype outside."""

    def forward(self, x: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        scale, offset = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, scale, offset, self.eps).to(x.dtype)


def make_norm(style: LayerStyle, size: int) -> nn.Module:
    """The norm of a style; none is the identity."""
    if style.norm == "rms":
        return RMSNorm(size, eps=style.norm_eps)
    return LayerNorm(size, eps=style.norm_eps) if style.norm == "layer" else nn.Identity()


class NormedLinear(nn.Module):
    """Linear → norm → activation."""

    def __init__(self, in_features: int, out_features: int, *, style: LayerStyle = DREAMER_V3) -> None:
        super().__init__()
        self.linear = Linear(in_features, out_features, init=style.init, bias=style.hidden_bias)
        self.norm: Any = make_norm(style, out_features)
        self.activate = style.activate

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out_features"]:
        return self.activate(self.norm(self.linear(x)))


class MLP(nn.Sequential):
    """`layers` times Linear → norm → activation. With no layers it is the identity."""

    def __init__(self, in_features: int, units: int, layers: int, *, style: LayerStyle = DREAMER_V3) -> None:
        sizes = [in_features] + [units] * layers
        parts = [NormedLinear(*pair, style=style) for pair in pairwise(sizes)]
        super().__init__(*parts)
        self.in_features, self.output_size, self._eps = in_features, sizes[-1], style.norm_eps
        self._tensors: list[LayerTensors] = []  # where the layers are of the kind whose derivative is written out
        if (style.norm, style.activation, style.hidden_bias) == ("rms", "silu", True):
            self._tensors = [LayerTensors(part.linear.weight, part.linear.bias, part.norm.weight) for part in parts]
        self.fused = False

    def fuse(self) -> bool:
        """Where nothing is compiled around it, run on a kernel of our own from now on: see `rl_lab.nn.fusion`."""
        self.fused = len(self._tensors) > 0 and has_triton(self._tensors[0].weight)
        return self.fused

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out"]:
        if self.fused and not torch.compiler.is_compiling() and math.prod(x.shape[:-1]) % 4 == 0:
            return self._forward_fused(x)
        return normed_layers(x, self._tensors, self._eps) if self.is_written_out(x) else super().forward(x)

    def forward_with(self, last: LastLayer, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out"]:
        """Together with the layer after it, where the derivative is written out."""
        return normed_layers(x, self._tensors, self._eps, last)

    def record_with(self, last: LastLayer, parts: int, rows: int) -> LayerRecord | None:
        """A record for so many parts of so many rows, where the derivative can be written out."""
        return LayerRecord(self._tensors, self._eps, last, parts=parts, rows=rows) if self._tensors else None

    def is_written_out(self, x: Tensor) -> bool:
        """Whether the derivative is, for inputs of this kind and size."""
        return len(self._tensors) > 0 and x.shape[-1] == self.in_features and in_float32_on_host(x)

    def _forward_fused(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out"]:
        """Two kernels a layer: the product, and the rest."""
        from rl_lab.nn.image_functions import rows_norm_silu

        rows = x.reshape(-1, x.shape[-1])
        for layer in self._tensors:
            rows = rows_norm_silu(F.linear(rows, layer.weight), layer.bias, layer.scale, eps=self._eps)
        return rows.view(*x.shape[:-1], self.output_size)


class Head(nn.Module):
    """An MLP with linear outputs, in float32. Several `outputs` are separate layers, concatenated."""

    def __init__(
        self, in_features: int, outputs: int | Sequence[int], *, units: int, layers: int, outscale: float = 1.0,
        style: LayerStyle = DREAMER_V3,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = (outputs,) if isinstance(outputs, int) else tuple(outputs)
        self.trunk = MLP(in_features, units, layers, style=style)
        self.outputs = nn.ModuleList(
            Linear(self.trunk.output_size, size, outscale=outscale, init=style.output_init) for size in sizes
        )

    def forward(
        self, x: Float[Tensor, "*lead in_features"], record: LayerRecord | None = None
    ) -> Float[Tensor, "*lead out"]:
        """`record`: of a network that has seen `x` already."""
        if record is not None:
            return record.outputs(x)
        last = self._last() if self.trunk.is_written_out(x) else None
        return self.output(self.trunk(x)) if last is None else self.trunk.forward_with(last, x)

    def fuse(self) -> bool:
        """Run the hidden layers on a kernel of our own from now on, where there is one."""
        return self.trunk.fuse()

    def record(self, parts: int, rows: int, like: Tensor) -> LayerRecord | None:
        """For so many parts of so many rows, where its derivative is written out for inputs of the kind of `like`."""
        last = self._last() if in_float32_on_host(like) else None
        return None if last is None else self.trunk.record_with(last, parts, rows)

    def _last(self) -> LastLayer | None:
        """The output layers as one, where no other kind has taken the place of one of them."""
        pairs = [(layer.weight, layer.bias) for layer in self.outputs if isinstance(layer, Linear)]
        if len(pairs) < len(self.outputs) or any(bias is None for _, bias in pairs):
            return None
        if len(pairs) == 1:
            return LastLayer(*pairs[0])
        with torch.enable_grad():  # a record is made without a gradient, and has one later
            return LastLayer(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))

    def output(self, x: Float[Tensor, "*lead units"]) -> Float[Tensor, "*lead out"]:
        """What follows the hidden layers."""
        parts = [output(x) for output in self.outputs]
        return at_least_float32(parts[0] if len(parts) == 1 else torch.cat(parts, -1))

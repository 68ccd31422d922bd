"""Layers as DreamerV3 initialises and normalises them, and in the styles of its predecessors.

Weights are drawn from a normal truncated at ±2σ with σ = 1.1368·sqrt(1/fan_in)·outscale (`fan_in`), from torch's global
generator; biases start at 0 and norm scales at 1. `outscale=0` gives zero weights, so that an output layer starts by
predicting 0. Older versions take the mean of both fans, and outscale as a factor of the variance: `fan_avg` is the
truncated normal, `glorot` the uniform distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.styles import DREAMER_V3, Initialization, LayerStyle

TRUNCATION_GAIN = 1.1368  # brings the standard deviation of the truncated normal back to 1


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
    """x / sqrt(mean(x²) + eps) · scale over the last axis; float32 inside, the input's dtype outside."""

    full_precision = True  # its weight stays float32 in copies of lower precision

    def __init__(self, size: int, *, eps: float = 1e-4) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        weight = self.weight
        if x.dtype == weight.dtype:
            return torch.rms_norm(x, weight.shape, weight, self.eps)
        return torch.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps).to(x.dtype)


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
        super().__init__(*(NormedLinear(*pair, style=style) for pair in pairwise(sizes)))
        self.in_features, self.output_size, self.style = in_features, sizes[-1], style


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

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out"]:
        hidden = self.trunk(x)
        parts = [output(hidden) for output in self.outputs]
        return at_least_float32(parts[0] if len(parts) == 1 else torch.cat(parts, -1))


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Inside, these modules' parameters get no gradient; what is computed with them still has one by its inputs."""
    parameters = [value for module in modules for value in module.parameters() if value.requires_grad]
    for value in parameters:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in parameters:
            value.requires_grad_(True)

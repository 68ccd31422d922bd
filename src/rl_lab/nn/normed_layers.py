"""Layers of Linear → RMSNorm → SiLU whose derivative is written out, in float32 on the CPU.

There small networks cost their operations, not their arithmetic: this takes fewer of them than autograd records.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn.math import constant


class LayerTensors(NamedTuple):
    """One layer."""

    weight: Tensor  # [out, in]
    bias: Tensor
    scale: Tensor  # of the norm


def normed_layers(x: Tensor, layers: list[LayerTensors], eps: float) -> Tensor:
    """The layers one after the other, over the last axis of `x`."""
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        outputs = _NormedLayers.apply(eps, rows, *(tensor for layer in layers for tensor in layer))
    else:
        outputs = rows
        for layer in layers:
            outputs = torch.addmm(layer.bias, outputs, layer.weight.t())
            normalize_(outputs, eps)
            outputs = F.silu(outputs.mul_(layer.scale), inplace=True)
    return outputs.view(*x.shape[:-1], -1)


def normalize_(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last axis, in place; the factor [..., 1] that `x` was multiplied with."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(constant(eps, x.dtype), size, size, value=1.0 / x.shape[-1], out=size).rsqrt_()
    x.mul_(factor)
    return factor


class _NormedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, x: Tensor, *tensors: Tensor) -> Tensor:
        saved = []
        for layer in _layers(tensors):
            normed = torch.addmm(layer.bias, x, layer.weight.t())
            factor = normalize_(normed, eps)
            scaled = normed * layer.scale
            saved += [x, normed, factor, scaled]
            x = F.silu(scaled)
        ctx.save_for_backward(*saved, *tensors)
        ctx.count = len(tensors) // len(LayerTensors._fields)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, layers = ctx.saved_tensors[: 4 * ctx.count], _layers(ctx.saved_tensors[4 * ctx.count :])
        gradients: list[Tensor | None] = []
        for number in reversed(range(ctx.count)):
            (x, normed, factor, scaled), layer = saved[4 * number : 4 * number + 4], layers[number]
            grad = torch.ops.aten.silu_backward(grad, scaled)
            product = grad * normed
            # What lies along the normed vector does not change its direction, so it has no effect.
            along = torch.mv(product, layer.scale).mul_(-1.0 / layer.scale.numel()).unsqueeze(1)
            grad = grad.mul_(layer.scale).addcmul_(normed, along).mul_(factor)
            frozen = not any(ctx.needs_input_grad[2 + 3 * number : 5 + 3 * number])
            own = [None, None, None] if frozen else [grad.t() @ x, grad.sum(0), product.sum(0)]
            gradients = [*own, *gradients]
            if number or ctx.needs_input_grad[1]:
                grad = grad @ layer.weight
        return None, grad if ctx.needs_input_grad[1] else None, *gradients


def _layers(tensors: tuple[Tensor, ...]) -> list[LayerTensors]:
    step = len(LayerTensors._fields)
    return [LayerTensors(*tensors[start : start + step]) for start in range(0, len(tensors), step)]

"""Layers of Linear → RMSNorm → SiLU whose derivative is written out, in float32 on the CPU.

There small networks cost their operations, not their arithmetic: this takes fewer of them than autograd records.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn.host_products import affine, product
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
        record = LayerRecord(layers, eps, parts=1, rows=len(rows))
        with torch.no_grad():
            record.extend(rows)
        return record.outputs(x)
    for layer in layers:
        rows = affine(rows, layer.weight.detach().t(), layer.bias)
        normalize_(rows, eps)
        rows = F.silu(rows.mul_(layer.scale), inplace=True)
    return rows.view(*x.shape[:-1], -1)


def normalize_(x: Tensor, eps: float, *, factor: Tensor | None = None) -> None:
    """Divide by the root mean square over the last axis, in place; `factor` takes the inverse of that, [..., 1]."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = size if factor is None else factor
    torch.addcmul(constant(eps, x.dtype), size, size, value=1.0 / x.shape[-1], out=factor)
    x.mul_(factor.rsqrt_())


class LayerRecord:
    """Layers that run on their rows part by part, without a gradient, and keep what a derivative needs of it: all rows
    then have one together, as if they had come together."""

    def __init__(self, layers: list[LayerTensors], eps: float, *, parts: int, rows: int) -> None:
        """For so many parts with so many rows each."""
        self._layers, self._eps = layers, eps
        sizes = [len(layer.bias) for layer in layers]
        # What is normed, the factors of the norm, and what the activation gave, of every layer.
        self._kept = [
            layers[0].weight.new_empty(parts * rows, size) for kind in (sizes, [1] * len(sizes), sizes) for size in kind
        ]
        by_part = zip(*(place.split(rows) for place in self._kept), strict=True)
        self._parts = by_part if parts > 1 else iter([self._kept])
        self._transposed = [layer.weight.detach().t() for layer in layers]

    def extend(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """What the layers make of the next part."""
        places, count = next(self._parts), len(self._layers)
        for number, (layer, weight) in enumerate(zip(self._layers, self._transposed, strict=True)):
            normed, factor, output = places[number::count]
            affine(x, weight, layer.bias, out=normed)
            normalize_(normed, self._eps, factor=factor)
            x = F.silu(torch.mul(normed, layer.scale, out=output), inplace=True)
        return x

    def outputs(self, x: Float[Tensor, "*lead inputs"]) -> Float[Tensor, "*lead outputs"]:
        """With a gradient, of the first rows; `x` are the inputs that they were."""
        rows = x.reshape(-1, x.shape[-1])
        kept = self._kept if len(rows) == len(self._kept[0]) else [place[: len(rows)] for place in self._kept]
        outputs = _NormedLayers.apply(rows, *kept, *(tensor for layer in self._layers for tensor in layer))
        return outputs.view(*x.shape[:-1], -1)


class _NormedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        """`tensors`: what a record kept, and those of the layers."""
        ctx.count = len(tensors) // 6
        ctx.save_for_backward(x, *tensors)
        return tensors[3 * ctx.count - 1].view_as(tensors[3 * ctx.count - 1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = ctx.count
        first, *saved = ctx.saved_tensors
        normed, factors, outputs = saved[:count], saved[count : 2 * count], saved[2 * count : 3 * count]
        inputs, tensors = [first, *outputs[:-1]], saved[3 * count :]
        gradients: list[Tensor | None] = []
        for number in reversed(range(count)):
            layer = LayerTensors(*tensors[3 * number : 3 * number + 3])
            grad = torch.ops.aten.silu_backward(grad, normed[number] * layer.scale)
            pull = grad * normed[number]
            # What lies along the normed vector does not change its direction, so it has no effect.
            along = torch.mv(pull, layer.scale).mul_(-1.0 / layer.scale.numel()).unsqueeze(1)
            grad = grad.mul_(layer.scale).addcmul_(normed[number], along).mul_(factors[number])
            place = 1 + 3 * (count + number)
            frozen = not any(ctx.needs_input_grad[place : place + 3])
            own = [None, None, None] if frozen else [grad.t() @ inputs[number], grad.sum(0), pull.sum(0)]
            gradients = [*own, *gradients]
            if number or ctx.needs_input_grad[0]:
                grad = product(grad, layer.weight.detach())
        return grad if ctx.needs_input_grad[0] else None, *[None] * (3 * count), *gradients

"""Layers of Linear → RMSNorm → SiLU whose derivative is written out, in float32 on the CPU.

There small networks cost their operations, not their arithmetic: this takes fewer of them than autograd records.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.host_mlp import Array
from rl_lab.nn.host_products import affine, array_product, laid_out, multiply


class LayerTensors(NamedTuple):
    """One layer."""

    weight: Tensor  # [out, in]
    bias: Tensor
    scale: Tensor  # of the norm


class LastLayer(NamedTuple):
    """A linear layer."""

    weight: Tensor  # [out, in]
    bias: Tensor


class _LayerArrays(NamedTuple):
    """The same for NumPy, as it is now."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]
    scale: Float[Array, " outputs"]

    @classmethod
    def of(cls, layer: LayerTensors, rows: int) -> _LayerArrays:
        """For so many rows."""
        weight, bias, scale = (tensor.detach().numpy() for tensor in layer)
        return cls(laid_out(weight.T, rows), bias, scale)


class _Kept(NamedTuple):
    """What a derivative needs of a layer's rows: what the norm gave, its factors, and what the activation gave."""

    normed: Float[Array, "rows outputs"]
    factors: Float[Array, " rows"]
    output: Float[Array, "rows outputs"]

    @classmethod
    def empty(cls, rows: int, size: int) -> _Kept:
        return cls(np.empty((rows, size), np.float32), np.empty(rows, np.float32), np.empty((rows, size), np.float32))

    def part(self, first: int, end: int) -> _Kept:
        return _Kept(self.normed[first:end], self.factors[first:end], self.output[first:end])


def normed_layers(x: Tensor, layers: list[LayerTensors], eps: float, last: LastLayer | None = None) -> Tensor:
    """The layers one after the other, and then the last one, over the last axis of `x`."""
    rows = x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        outputs = torch.from_numpy(HostLayers(layers, eps, rows=rows.shape[0])(rows.detach().numpy()))
        return (outputs if last is None else affine(outputs, *last)).view(*x.shape[:-1], -1)
    record = LayerRecord(layers, eps, last, parts=1, rows=rows.shape[0])
    return record.outputs(x, record.extend(rows))


class HostLayers:
    """Layers to run without a gradient, as long as their weights stay as they are."""

    def __init__(self, layers: list[LayerTensors], eps: float, *, rows: int) -> None:
        """On about so many rows."""
        self._layers, self._eps = [_LayerArrays.of(layer, rows) for layer in layers], eps

    def __call__(self, x: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
        for weight, bias, scale in self._layers:
            x = multiply(x, weight, np.empty((len(x), len(bias)), np.float32))
            kernels.norm_silu(x, bias[None], scale[None], self._eps)
        return x


class LayerRecord:
    """Layers that run on their rows part by part, without a gradient, and keep what a derivative needs of it: all rows
    then have one together, as if they had come together."""

    def __init__(
        self, layers: list[LayerTensors], eps: float, last: LastLayer | None = None, *, parts: int, rows: int
    ) -> None:
        """For so many parts with so many rows each. `last`: what follows the layers."""
        self._layers, self._last, self._eps, self._rows, self._extended = layers, last, eps, rows, 0
        self._arrays = [_LayerArrays.of(layer, rows) for layer in layers]
        self._kept = [_Kept.empty(parts * rows, len(layer.bias)) for layer in self._arrays]
        self._weight = None if last is None else laid_out(last.weight.detach().numpy().T, rows)

    def extend(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """What the layers make of the next part, without a gradient."""
        first, self._extended = self._extended, self._extended + self._rows
        rows = x.detach().numpy()
        for (weight, bias, scale), kept in zip(self._arrays, self._kept, strict=True):
            normed, factors, output = kept.part(first, self._extended)
            multiply(rows, weight, normed)
            kernels.norm_silu_kept(normed, bias, scale, self._eps, factors, output)
            rows = output
        if self._last is not None and self._weight is not None:
            rows = multiply(rows, self._weight, np.empty((self._rows, self._weight.shape[1]), np.float32))
            rows += self._last.bias.detach().numpy()
        return torch.from_numpy(rows)

    def outputs(self, x: Float[Tensor, "*lead inputs"], result: Tensor | None = None) -> Float[Tensor, "*lead outputs"]:
        """With a gradient, of the first rows; `x` are the inputs that they were. `result`: where it is at hand."""
        rows = x.reshape(-1, x.shape[-1])
        kept = [layer.part(0, rows.shape[0]) for layer in self._kept]
        if result is None:
            hidden = torch.from_numpy(kept[-1].output)
            result = hidden if self._last is None else affine(hidden, *self._last)
        layers = self._layers if self._last is None else [*self._layers, self._last]
        outputs = _NormedLayers.apply(kept, result, rows, *(part for layer in layers for part in layer))
        return outputs.view(*x.shape[:-1], -1)


class _NormedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: list[_Kept], result: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        """`tensors`: those of the layers, and of a last one where there is one. `result`: what these give."""
        ctx.kept = kept
        ctx.save_for_backward(x, *tensors)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, (_, _, needs_x, *needs), (x, *tensors) = ctx.kept, ctx.needs_input_grad, ctx.saved_tensors
        gradients: list[Tensor | None] = []
        end = 3 * len(kept)
        slope = grad.contiguous().numpy()
        if len(tensors) > end:
            gradients = [_by_weight(slope, kept[-1].output), grad.sum(0)] if any(needs[end:]) else [None, None]
            slope = array_product(slope, tensors[end].detach().numpy())
        for number in reversed(range(len(kept))):
            weight, _, scale = (tensor.detach().numpy() for tensor in tensors[3 * number : 3 * number + 3])
            normed, factors, _ = kept[number]
            by_rows, (by_scale, by_bias) = np.empty_like(normed), np.empty((2, len(scale)), np.float32)
            kernels.norm_silu_backward(slope, normed, factors, scale, by_rows, by_scale, by_bias)
            own: list[Tensor | None] = [None, None, None]
            if any(needs[3 * number : 3 * number + 3]):
                inputs = kept[number - 1].output if number else x.detach().numpy()
                own = [_by_weight(by_rows, inputs), torch.from_numpy(by_bias), torch.from_numpy(by_scale)]
            gradients = [*own, *gradients]
            if number or needs_x:
                slope = array_product(by_rows, weight)
        return None, None, torch.from_numpy(slope) if needs_x else None, *gradients


def _by_weight(by_outputs: Float[Array, "rows outputs"], inputs: Float[Array, "rows inputs"]) -> Tensor:
    return torch.from_numpy(by_outputs).t() @ torch.from_numpy(inputs)

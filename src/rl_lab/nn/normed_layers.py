"""Layers of Linear → RMSNorm → SiLU whose derivative is written out, in float32 on the CPU.

There small networks cost their operations, not their arithmetic: this takes fewer of them than autograd records. Rows
go through all layers a block at a time, so that they stay in the cache, and threads share the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn import host_kernels as kernels
from rl_lab.nn import layer_kernels
from rl_lab.nn.host_mlp import Array
from rl_lab.nn.host_products import laid_out, multiply
from rl_lab.nn.host_threads import VERY_MANY, share_rows

BLOCK = 512  # rows that go through all layers together


class LayerTensors(NamedTuple):
    """One layer."""

    weight: Tensor  # [out, in]
    bias: Tensor
    scale: Tensor  # of the norm


class LastLayer(NamedTuple):
    """A linear layer."""

    weight: Tensor  # [out, in]
    bias: Tensor


class _Layer(NamedTuple):
    """A layer as it is now, for NumPy."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]
    scale: Float[Array, " outputs"] | None  # of a linear layer: none
    small: bool

    @classmethod
    def of(cls, layer: LayerTensors | LastLayer, rows: int) -> _Layer:
        """For so many rows."""
        weight, *rest = (tensor.detach().numpy() for tensor in layer)
        small = layer_kernels.is_small(weight)
        return cls(
            np.ascontiguousarray(weight.T) if small else laid_out(weight.T, rows),
            rest[0], rest[1] if len(rest) > 1 else None, small,
        )  # fmt: skip

    def run(self, x: Float[Array, "rows inputs"], eps: float, out: Float[Array, "rows outputs"]) -> None:
        weight, bias, scale, small = self
        if scale is not None and small:
            layer_kernels.normed_layer(x, weight, bias[None], scale[None], eps, out)
        elif scale is not None:
            kernels.norm_silu(multiply(x, weight, out), bias[None], scale[None], eps)
        elif small:
            layer_kernels.linear(x, weight, bias, out)
        else:
            out[:] = multiply(x, weight, out) + bias

    def run_kept(self, x: Float[Array, "rows inputs"], eps: float, kept: _Kept) -> None:
        """A normed layer, with what its derivative needs."""
        weight, bias, scale, small = self
        if small:
            layer_kernels.normed_layer_kept(x, weight, bias, scale, eps, *kept)
        else:
            kernels.norm_silu_kept(multiply(x, weight, kept.normed), bias, scale, eps, *kept[1:])


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
    if torch.is_grad_enabled():
        rows = _rows(x)
        record = LayerRecord(layers, eps, last, parts=1, rows=rows.shape[0])
        return record.outputs(x, record.extend(rows))
    given = _rows(x).detach().numpy()
    *hidden, end = (_Layer.of(layer, len(given)) for layer in _together(layers, last))
    outputs = np.empty((len(given), len(end.bias)), np.float32)

    def work(start: int, stop: int) -> None:
        rows = given[start:stop]
        for layer in hidden:
            inputs, rows = rows, np.empty((len(rows), len(layer.bias)), np.float32)
            layer.run(inputs, eps, rows)
        end.run(rows, eps, outputs[start:stop])

    _share_blocks(work, len(given))
    return torch.from_numpy(outputs).view(*x.shape[:-1], -1)


class LayerRecord:
    """Layers that run on their rows part by part, without a gradient, and keep what a derivative needs of it: all rows
    then have one together, as if they had come together."""

    def __init__(
        self, layers: list[LayerTensors], eps: float, last: LastLayer | None = None, *, parts: int, rows: int
    ) -> None:
        """For so many parts with so many rows each. `last`: what follows the layers."""
        self._tensors, self._eps, self.rows = _together(layers, last), eps, rows
        self._layers = [_Layer.of(layer, rows) for layer in layers]
        self._last = None if last is None else _Layer.of(last, rows)
        self._kept = [_Kept.empty(parts * rows, len(layer.bias)) for layer in self._layers]

    def extend(self, x: Float[Tensor, "rows inputs"], at: int = 0) -> Float[Tensor, "rows outputs"]:
        """What the layers make of rows, without a gradient. `at`: their place among all rows of all parts."""
        rows = x.detach().contiguous().numpy()
        last = self._layers[-1] if self._last is None else self._last
        outputs = np.empty((len(rows), len(last.bias)), np.float32)
        _share_blocks(lambda first, end: self._run(rows[first:end], at + first, outputs[first:end]), len(rows))
        return torch.from_numpy(outputs)

    def _run(self, x: Float[Array, "rows inputs"], at: int, outputs: Float[Array, "rows outputs"]) -> None:
        for layer, kept in zip(self._layers, self._kept, strict=True):
            own = kept.part(at, at + len(x))
            layer.run_kept(x, self._eps, own)
            x = own.output
        if self._last is None:
            outputs[:] = x
        else:
            self._last.run(x, self._eps, outputs)

    def outputs(self, x: Float[Tensor, "*lead inputs"], result: Tensor | None = None) -> Float[Tensor, "*lead outputs"]:
        """With a gradient, of the first rows; `x` are the inputs that they were. `result`: where it is at hand."""
        rows = _rows(x)
        kept = [layer.part(0, rows.shape[0]) for layer in self._kept]
        if result is None:
            result = torch.from_numpy(self._outputs_of(kept[-1].output))
        outputs = _NormedLayers.apply(kept, result, rows, *(part for layer in self._tensors for part in layer))
        return outputs.view(*x.shape[:-1], -1)

    def _outputs_of(self, hidden: Float[Array, "rows units"]) -> Float[Array, "rows outputs"]:
        last = self._last
        if last is None:
            return hidden
        outputs = np.empty((len(hidden), len(last.bias)), np.float32)

        def work(first: int, end: int) -> None:
            last.run(hidden[first:end], self._eps, outputs[first:end])

        share_rows(work, len(hidden), least=VERY_MANY)
        return outputs


def _together(layers: list[LayerTensors], last: LastLayer | None) -> list[LayerTensors | LastLayer]:
    return [*layers, last] if last is not None else [*layers]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


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
        (_, _, needs_x, *needs), (x, *tensors) = ctx.needs_input_grad, ctx.saved_tensors
        given, slope = x.detach().numpy(), grad.contiguous().numpy()
        arrays = [tensor.detach().numpy() for tensor in tensors]
        by_x = np.empty(given.shape if needs_x else (0, 0), np.float32)

        def work(first: int, end: int) -> list[Array]:
            # Without rows: the weight's is left out.
            sums = [np.zeros(own.shape if wanted or own.ndim == 1 else (0, 0), np.float32)
                    for own, wanted in zip(arrays, needs, strict=True)]  # fmt: skip
            for start, stop in _blocks(first, end):
                kept = [layer.part(start, stop) for layer in ctx.kept]
                _block_backward(slope[start:stop], given[start:stop], arrays, kept, by_x[start:stop], sums)
            return sums

        parts = share_rows(work, len(slope))
        sums = [sum(own[1:], own[0]) for own in zip(*parts, strict=True)]
        by_tensors = [torch.from_numpy(own) if wanted else None for own, wanted in zip(sums, needs, strict=True)]
        return None, None, torch.from_numpy(by_x) if needs_x else None, *by_tensors


def _block_backward(
    grad: Array, x: Array, tensors: list[Array], kept: list[_Kept], by_x: Array, sums: list[Array]
) -> None:
    """Of some rows, from the derivative by the outputs to that by `x`, where `by_x` has rows. Those by the tensors are
    added to `sums`, where these have rows."""
    end = 3 * len(kept)
    if len(tensors) > end:
        by_outputs, grad = grad, np.empty_like(kept[-1].output)
        _linear_backward(by_outputs, tensors[end], kept[-1].output, grad, sums[end], sums[end + 1])
    for number in reversed(range(len(kept))):
        weight, _, scale = tensors[3 * number : 3 * number + 3]
        by_weight, by_bias, by_scale = sums[3 * number : 3 * number + 3]
        inputs = kept[number - 1].output if number else x
        by_inputs = np.empty_like(inputs) if number else by_x
        normed, factors, _ = kept[number]
        if layer_kernels.is_small(weight):
            layer_kernels.normed_layer_backward(
                grad, normed, factors, scale, weight, inputs, by_inputs, by_weight, by_bias, by_scale
            )
        else:
            by_rows, unused = np.empty_like(normed), np.empty_like(scale)
            kernels.norm_silu_backward(grad, normed, factors, scale, by_rows, by_scale, unused)
            _linear_backward(by_rows, weight, inputs, by_inputs, by_weight, by_bias)
        grad = by_inputs


def _linear_backward(grad: Array, weight: Array, x: Array, by_x: Array, by_weight: Array, by_bias: Array) -> None:
    """`layer_kernels.linear_backward` for weights of any size."""
    if layer_kernels.is_small(weight):
        layer_kernels.linear_backward(grad, weight, x, by_x, by_weight, by_bias)
        return
    if len(by_weight):
        torch.from_numpy(by_weight).addmm_(torch.from_numpy(grad).t(), torch.from_numpy(x))
    by_bias += grad.sum(0)
    if len(by_x):
        multiply(grad, weight, by_x)


def _share_blocks(work: Callable[[int, int], None], rows: int) -> None:
    """work(first, end) for blocks of rows, which threads share."""

    def part(first: int, end: int) -> None:
        for block in _blocks(first, end):
            work(*block)

    share_rows(part, rows)


def _blocks(first: int, end: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, end)) for start in range(first, end, BLOCK))

"""Layers of Linear → RMSNorm → SiLU whose derivative is written out, in float32 on the CPU.

There small networks cost their operations, not their arithmetic: this takes fewer of them than autograd records. Rows
go through all layers some at a time, so that they stay in the cache, and threads share them. Where all layers are
small, what a thread does is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn import host_kernels as kernels
from rl_lab.nn import stack_kernels
from rl_lab.nn.dream_kernel import PolicyArrays, Sampling
from rl_lab.nn.host_mlp import Array
from rl_lab.nn.host_products import laid_out, multiply
from rl_lab.nn.host_threads import share_rows
from rl_lab.nn.layer_kernels import MOST_ROWS, is_small
from rl_lab.nn.stack_kernels import Kept, LayerArrays, LinearArrays, padded

BLOCK = 512  # rows that go through large layers together


class LayerTensors(NamedTuple):
    """One layer."""

    weight: Tensor  # [out, in]
    bias: Tensor
    scale: Tensor  # of the norm


class LastLayer(NamedTuple):
    """A linear layer."""

    weight: Tensor  # [out, in]
    bias: Tensor


class _Stack(NamedTuple):
    """Layers as arrays, or the derivatives by them."""

    layers: tuple[LayerArrays, ...]  # padded
    last: LinearArrays  # where there is none: without rows
    depth: int  # how many layers there are before it

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> _Stack:
        """Those of one layer after the other."""
        count = len(arrays) // 3
        layers = tuple(LayerArrays(*arrays[3 * number : 3 * number + 3]) for number in range(count))
        last = arrays[3 * count :] or [np.empty((0, 0), np.float32), np.empty(0, np.float32)]
        return cls(padded(layers), LinearArrays(*last), count)


class _Forward:
    """Layers as they are now, laid out for so many rows."""

    def __init__(self, tensors: Sequence[Tensor], eps: float, rows: int) -> None:
        arrays = _arrays(tensors)
        self._small, self._eps = _all_small(arrays), eps
        self._stack = _Stack.of([self._turned(own, rows) if own.ndim == 2 else own for own in arrays])
        self.output_size = len(arrays[-1])

    def _turned(self, weight: Float[Array, "outputs inputs"], rows: int) -> Float[Array, "inputs outputs"]:
        return np.ascontiguousarray(weight.T) if self._small else laid_out(weight.T, rows)

    def room(self, rows: int) -> tuple[Kept, ...]:
        """For what a derivative needs of so many rows."""
        shapes = [(rows, len(layer.bias)) for layer in self._stack.layers[: self._stack.depth]]
        return padded(tuple(Kept(*(np.empty(own, np.float32) for own in (shape, rows, shape))) for shape in shapes))

    def run(self, x: Array, kept: tuple[Kept, ...] | None, at: int, outputs: Array) -> None:
        """See `stack_kernels.forward`."""
        forward: Callable[..., None] = stack_kernels.forward if self._small else _forward_large

        def work(first: int, end: int) -> None:
            room = kept or self.room(min(end - first, MOST_ROWS if self._small else BLOCK))
            forward(x, *self._stack, self._eps, room, kept is not None, at, outputs, first, end)

        share_rows(work, len(x))

    def policy_arrays(self, kept: tuple[Kept, ...], outputs: Array, sampling: Sampling) -> PolicyArrays | None:
        """See `LayerRecord.policy_arrays`."""
        return PolicyArrays(*self._stack, self._eps, kept, outputs, sampling) if self._small else None


def normed_layers(x: Tensor, layers: list[LayerTensors], eps: float, last: LastLayer | None = None) -> Tensor:
    """The layers one after the other, and then the last one, over the last axis of `x`."""
    rows = _rows(x)
    if torch.is_grad_enabled():
        record = LayerRecord(layers, eps, last, parts=1, rows=rows.shape[0])
        record.extend(rows)
        return record.outputs(x)
    given = rows.detach().numpy()
    forward = _Forward(_tensors(layers, last), eps, len(given))
    outputs = np.empty((len(given), forward.output_size), np.float32)
    forward.run(given, None, 0, outputs)
    return torch.from_numpy(outputs).view(*x.shape[:-1], -1)


class LayerRecord:
    """Layers that run on their rows part by part, without a gradient, and keep what a derivative needs of it: all rows
    then have one together, as if they had come together."""

    def __init__(
        self, layers: list[LayerTensors], eps: float, last: LastLayer | None = None, *, parts: int, rows: int
    ) -> None:
        """For so many parts with so many rows each. `last`: what follows the layers."""
        self._tensors, self.rows = _tensors(layers, last), rows
        self._forward = _Forward(self._tensors, eps, rows)
        self._kept = self._forward.room(parts * rows)
        self._outputs = np.empty((parts * rows, self._forward.output_size), np.float32)

    def extend(self, x: Float[Tensor, "rows inputs"], at: int = 0) -> Float[Tensor, "rows outputs"]:
        """What the layers make of rows, without a gradient. `at`: their place among all rows of all parts."""
        self._forward.run(x.detach().contiguous().numpy(), self._kept, at, self._outputs)
        return torch.from_numpy(self._outputs[at : at + len(x)])

    def policy_arrays(self, sampling: Sampling) -> PolicyArrays | None:
        """For a kernel that runs the layers in place of `extend`; None where they are too large for one."""
        return self._forward.policy_arrays(self._kept, self._outputs, sampling)

    def outputs(self, x: Float[Tensor, "*lead inputs"], at: int = 0) -> Float[Tensor, "*lead outputs"]:
        """With a gradient, of the rows from `at` on; `x` are the inputs that they were."""
        rows = _rows(x)
        place = slice(at, at + len(rows))
        kept = tuple(Kept(*(array[place] for array in own)) for own in self._kept)
        result = torch.from_numpy(self._outputs[place])
        return _NormedLayers.apply(kept, result, rows, *self._tensors).view(*x.shape[:-1], -1)


def _tensors(layers: list[LayerTensors], last: LastLayer | None) -> list[Tensor]:
    """Those of one layer after the other."""
    return [tensor for layer in (*layers, last or ()) for tensor in layer]


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _all_small(arrays: Sequence[Array]) -> bool:
    return is_small(*(own for own in arrays if own.ndim == 2))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _NormedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: tuple[Kept, ...], result: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        """`tensors`: those of the layers, and of a last one where there is one. `result`: what these give."""
        ctx.kept = kept
        ctx.save_for_backward(x, *tensors)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, _, needs_x, *needs = ctx.needs_input_grad
        slope, given, *arrays = _arrays([grad, *ctx.saved_tensors])
        stack = _Stack.of(arrays)
        by_x = np.empty(given.shape if needs_x else (0, 0), np.float32)
        backward: Callable[..., None] = stack_kernels.backward if _all_small(arrays) else _backward_large

        def work(first: int, end: int) -> list[Array]:
            # Without rows: the weight's is left out.
            sums = [np.zeros(own.shape if wanted or own.ndim == 1 else (0, 0), np.float32)
                    for own, wanted in zip(arrays, needs, strict=True)]  # fmt: skip
            by_layers, by_last, _ = _Stack.of(sums)
            backward(slope, given, *stack, ctx.kept, by_x, by_layers, by_last, first, end)
            return sums

        parts = share_rows(work, len(slope))
        sums = [sum(own[1:], own[0]) for own in zip(*parts, strict=True)]
        by_tensors = [torch.from_numpy(own) if wanted else None for own, wanted in zip(sums, needs, strict=True)]
        return None, None, torch.from_numpy(by_x) if needs_x else None, *by_tensors


# `stack_kernels` for layers of any size -------------------------------------------------------------------------------


def _forward_large(
    x: Array, layers: tuple[LayerArrays, ...], last: LinearArrays, count: int, eps: float, kept: tuple[Kept, ...],
    keeps: bool, at: int, outputs: Array, first: int, end: int,
) -> None:  # fmt: skip
    for start, stop in _blocks(first, end):
        inputs, out, place = x[start:stop], outputs[at + start : at + stop], at + start if keeps else 0
        for layer, own in zip(layers[:count], kept, strict=False):
            normed, factors, output = (array[place : place + stop - start] for array in own)
            pre = multiply(inputs, layer.weight, normed)
            kernels.norm_silu_kept(pre, layer.bias, layer.scale, eps, factors, output)
            inputs = output
        out[:] = multiply(inputs, last.weight, out) + last.bias if len(last.weight) else inputs


def _backward_large(
    grad: Array, x: Array, layers: tuple[LayerArrays, ...], last: LinearArrays, count: int, kept: tuple[Kept, ...],
    by_x: Array, by_layers: tuple[LayerArrays, ...], by_last: LinearArrays, first: int, end: int,
) -> None:  # fmt: skip
    for start, stop in _blocks(first, end):
        slope, inputs = grad[start:stop], [x[start:stop], *(own.output[start:stop] for own in kept[:count])]
        if len(last.weight):
            by_hidden = np.empty_like(inputs[-1])
            _linear_backward(slope, last.weight, inputs[-1], by_hidden, by_last.weight, by_last.bias)
            slope = by_hidden
        for number in reversed(range(count)):
            layer, own, sums = layers[number], kept[number], by_layers[number]
            by_normed, unused = np.empty_like(slope), np.empty_like(layer.bias)
            normed, factors = own.normed[start:stop], own.factors[start:stop]
            kernels.norm_silu_backward(slope, normed, factors, layer.scale, by_normed, sums.scale, unused)
            slope = np.empty_like(inputs[number]) if number else by_x[start:stop]
            _linear_backward(by_normed, layer.weight, inputs[number], slope, sums.weight, sums.bias)


def _linear_backward(grad: Array, weight: Array, x: Array, by_x: Array, by_weight: Array, by_bias: Array) -> None:
    """What has no rows, of `by_x` and `by_weight`, is left out."""
    if len(by_weight):
        torch.from_numpy(by_weight).addmm_(torch.from_numpy(grad).t(), torch.from_numpy(x))
    by_bias += grad.sum(0)
    if len(by_x):
        multiply(grad, weight, by_x)


def _blocks(first: int, end: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, end)) for start in range(first, end, BLOCK))

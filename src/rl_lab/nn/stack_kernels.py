"""Networks of small layers on the CPU, forwards and backwards, each as one kernel: see `rl_lab.nn.host_kernels`.

A few rows go through all layers before the next ones do, so that they stay in the cache, and nothing of it holds
Python's lock: threads can share the rows. `first` and `end` say which ones a call is about. Of the tuples with a record
for each layer, which are `padded`, the first `count` hold; a `last` layer without rows is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from rl_lab.nn.host_kernels import kernel, norm_silu_backward, norm_silu_kept, part
from rl_lab.nn.host_mlp import Array
from rl_lab.nn.layer_kernels import MOST_ROWS, add_outer, product, rows_at_once

LENGTH = 4  # of the tuples: a multiple of it

Record = TypeVar("Record", bound=NamedTuple)


class LayerArrays(NamedTuple):
    """Linear → RMSNorm → SiLU. Its weight is laid out for the product: forwards this way, backwards the other."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]
    scale: Float[Array, " outputs"]


class LinearArrays(NamedTuple):
    """A linear layer."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]


class Kept(NamedTuple):
    """What a derivative needs of a layer's rows: what the norm gave, its factors, and what the activation gave."""

    normed: Float[Array, "rows outputs"]
    factors: Float[Array, " rows"]
    output: Float[Array, "rows outputs"]


def padded(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """With the last one again: kernels are compiled anew for every length, which takes seconds."""
    return records + records[-1:] * (-len(records) % LENGTH)


@kernel
def forward(
    x: Any, layers: Any, last: Any, count: Any, eps: Any, kept: Any, keeps: Any, at: Any, outputs: Any, first: Any,
    end: Any,
) -> None:  # fmt: skip
    """From rows of `x` to `outputs`, and to what is kept of each layer, both from row `at` on. Where nothing `keeps`
    that, rows take the places of those before them."""
    for start in range(first, end, MOST_ROWS):
        stop = min(start + MOST_ROWS, end)
        inputs, out = x[start:stop], outputs[at + start : at + stop]
        place = at + start if keeps else 0
        filled = place + stop - start
        for number in range(count):
            layer, own = layers[number], kept[number]
            product(inputs, layer.weight, own.normed[place:filled])
            norm_silu_kept(
                own.normed[place:filled], layer.bias, layer.scale, eps, own.factors[place:filled],
                own.output[place:filled],
            )  # fmt: skip
            inputs = own.output[place:filled]
        if last.weight.shape[0]:
            product(inputs, last.weight, out)
            for i in range(out.shape[0]):
                for j in range(out.shape[1]):
                    out[i, j] += last.bias[j]
        else:
            out[:] = inputs


@kernel
def backward(
    grad: Any, x: Any, layers: Any, last: Any, count: Any, kept: Any, by_x: Any, by_layers: Any, by_last: Any,
    first: Any, end: Any,
) -> None:  # fmt: skip
    """From the derivative by the outputs to that by `x`; those by the layers are added to what is there. A `by_x` or a
    weight among these that has no rows is left out."""
    widest = 0
    for layer in layers:
        widest = max(widest, layer.weight.shape[0])
    by_normed, by_inputs = np.empty(MOST_ROWS * widest, np.float32), np.empty(MOST_ROWS * widest, np.float32)
    for start in range(first, end, MOST_ROWS):
        stop = min(start + MOST_ROWS, end)
        rows, slope = stop - start, grad[start:stop]
        if last.weight.shape[0]:
            hidden = kept[count - 1].output[start:stop]
            below = by_inputs[: hidden.size].reshape(hidden.shape)
            for i in range(rows):
                for j in range(slope.shape[1]):
                    by_last.bias[j] += slope[i, j]
            _product_backward(slope, last.weight, hidden, below, by_last.weight)
            slope = below
        for number in range(count - 1, -1, -1):
            layer, own, sums = layers[number], kept[number], by_layers[number]
            normed = own.normed[start:stop]
            step = by_normed[: normed.size].reshape(normed.shape)
            norm_silu_backward(slope, normed, own.factors[start:stop], layer.scale, step, sums.scale, sums.bias)
            inputs = kept[number - 1].output[start:stop] if number else x[start:stop]
            below = by_inputs[: inputs.size].reshape(inputs.shape) if number else by_x[start:stop]
            _product_backward(step, layer.weight, inputs, below, sums.weight)
            slope = below


@part
def _product_backward(grad: Any, weight: Any, x: Any, by_x: Any, by_weight: Any) -> None:
    """Of grad = x @ weightᵀ; what has no rows, of `by_x` and `by_weight`, is left out."""
    if by_weight.shape[0]:
        at_once = rows_at_once(weight)
        for first in range(0, x.shape[0], at_once):
            add_outer(grad[first : first + at_once], x[first : first + at_once], by_weight)
    if by_x.shape[0]:
        product(grad, weight, by_x)

"""Small layers on the CPU, forwards and backwards, each as one kernel: see `rl_lab.nn.host_kernels`.

Rows go through the product and what follows it a few at a time, so that they stay in the cache, and nothing of it holds
Python's lock: threads can share the rows. Products are BLAS's, by the way that Numba's own take (it needs SciPy).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_lab.nn.fusion import has_numba
from rl_lab.nn.host_blas import SMALL_CALLS, fast_calls
from rl_lab.nn.host_kernels import inline, kernel, norm_silu, norm_silu_backward, norm_silu_kept, part
from rl_lab.nn.host_mlp import ONE_THREAD

MOST_ROWS, MOST_MULTIPLICATIONS = fast_calls() if has_numba() else SMALL_CALLS  # at once
SMALL = ONE_THREAD // 2  # numbers of a weight, for two rows at once

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
_SINGLE, _PLAIN, _TRANSPOSED = (np.int8(ord(letter)) for letter in "snt")

if has_numba():
    from numba import types

    _size, _letter, _numbers = types.intp, types.char, types.CPointer(types.float32)
    # (type, transpose left, transpose right, rows, columns, inner, alpha, left, its stride, right, …, beta, out, …), of
    # arrays that are stored column by column: for ours, left and right change places.
    _signature = types.intc(*[_letter] * 3, *[_size] * 3, _numbers, *[_numbers, _size] * 2, _numbers, _numbers, _size)
    _gemm: Any = types.ExternalFunction("numba_xxgemm", _signature)


def is_small(*weights: Any) -> bool:
    """Whether layers with these weights are for the kernels here. They are arrays or tensors."""
    return all(weight.shape[-1] * weight.shape[-2] <= SMALL for weight in weights)


@inline
def rows_at_once(weight: Any) -> Any:
    """So few that BLAS takes one thread, and an even number of them: those are the fast ones."""
    rows = min(MOST_ROWS, MOST_MULTIPLICATIONS // weight.size)
    return rows - rows % (4 if rows >= 4 else 2)


@inline
def stride(x: Any) -> Any:
    """From a row to the next one; a single row may say anything."""
    return max(x.strides[0] // 4, x.shape[1])


@part
def _multiply(x: Any, weight: Any, how: Any, inner: Any, outputs: Any, beta: Any, out: Any) -> None:
    step = rows_at_once(weight)
    for first in range(0, x.shape[0], step):
        own, target = x[first : first + step], out[first : first + step]
        _gemm(_SINGLE, how, _PLAIN, outputs, own.shape[0], inner, _ONE.ctypes, weight.ctypes, stride(weight),
              own.ctypes, stride(own), beta.ctypes, target.ctypes, stride(target))  # fmt: skip


@part
def product(x: Any, weight: Any, out: Any) -> None:
    """out = x @ weight. The numbers of a row lie side by side in all three."""
    _multiply(x, weight, _PLAIN, weight.shape[0], weight.shape[1], _ZERO, out)


@part
def add_product(x: Any, weight: Any, out: Any) -> None:
    """out += x @ weight."""
    _multiply(x, weight, _PLAIN, weight.shape[0], weight.shape[1], _ONE, out)


@part
def transposed_product(x: Any, weight: Any, out: Any) -> None:
    """out = x @ weightᵀ."""
    _multiply(x, weight, _TRANSPOSED, weight.shape[1], weight.shape[0], _ZERO, out)


@part
def add_transposed_product(x: Any, weight: Any, out: Any) -> None:
    """out += x @ weightᵀ."""
    _multiply(x, weight, _TRANSPOSED, weight.shape[1], weight.shape[0], _ONE, out)


@part
def add_outer(left: Any, right: Any, out: Any) -> None:
    """out += leftᵀ @ right, of as many rows as there are at once for `out`: sums over them."""
    _gemm(_SINGLE, _PLAIN, _TRANSPOSED, right.shape[1], left.shape[1], right.shape[0], _ONE.ctypes, right.ctypes,
          stride(right), left.ctypes, stride(left), _ONE.ctypes, out.ctypes, stride(out))  # fmt: skip


@part
def add_block_product(x: Any, weight: Any, out: Any) -> None:
    """Add [rows, G·n] times [G, n, m], block by block, to [rows, G·m]; of `x` the first columns count."""
    blocks, inner, size = weight.shape
    for block in range(blocks):
        own = out[:, block * size : (block + 1) * size]
        add_product(x[:, block * inner : (block + 1) * inner], weight[block], own)


@part
def add_transposed_block_product(x: Any, weight: Any, out: Any) -> None:
    """The same with [G, m, n]ᵀ."""
    blocks, size, inner = weight.shape
    for block in range(blocks):
        own = out[:, block * size : (block + 1) * size]
        add_transposed_product(x[:, block * inner : (block + 1) * inner], weight[block], own)


@part
def set_rows(out: Any, row: Any) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = row[j]


@kernel
def linear(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """out = x @ weight + bias; the weight is [inputs, outputs]."""
    step = rows_at_once(weight)
    for first in range(0, x.shape[0], step):
        own = out[first : first + step]
        product(x[first : first + step], weight, own)
        for i in range(own.shape[0]):
            for j in range(own.shape[1]):
                own[i, j] += bias[j]


@kernel
def normed_layer(x: Any, weight: Any, bias: Any, scale: Any, eps: Any, out: Any) -> None:
    """out = silu(norm(x @ weight + bias)·scale); bias and scale are [1, outputs]."""
    step = rows_at_once(weight)
    for first in range(0, x.shape[0], step):
        own = out[first : first + step]
        product(x[first : first + step], weight, own)
        norm_silu(own, bias, scale, eps)


@kernel
def normed_layer_kept(
    x: Any, weight: Any, bias: Any, scale: Any, eps: Any, normed: Any, factors: Any, out: Any
) -> None:
    """The same with what its derivative needs: see `norm_silu_kept`. Bias and scale are [outputs]."""
    step = rows_at_once(weight)
    for first in range(0, x.shape[0], step):
        end = first + step
        product(x[first:end], weight, normed[first:end])
        norm_silu_kept(normed[first:end], bias, scale, eps, factors[first:end], out[first:end])


@kernel
def linear_backward(grad: Any, weight: Any, x: Any, by_x: Any, by_weight: Any, by_bias: Any) -> None:
    """From the derivative by the outputs to that by `x`; those by weight and bias are added to what is there. Weights
    are [outputs, inputs]. What has no rows, of `by_x` and `by_weight`, is left out."""
    step = rows_at_once(weight)
    for first in range(0, x.shape[0], step):
        end = first + step
        own = grad[first:end]
        if by_weight.shape[0]:
            add_outer(own, x[first:end], by_weight)
        for i in range(own.shape[0]):
            for j in range(own.shape[1]):
                by_bias[j] += own[i, j]
        if by_x.shape[0]:
            product(own, weight, by_x[first:end])


@kernel
def normed_layer_backward(
    grad: Any, normed: Any, factors: Any, scale: Any, weight: Any, x: Any, by_x: Any, by_weight: Any, by_bias: Any,
    by_scale: Any,
) -> None:  # fmt: skip
    """The same for a normed layer."""
    step = rows_at_once(weight)
    by_rows = np.empty((step, weight.shape[0]), np.float32)
    for first in range(0, x.shape[0], step):
        end = min(first + step, x.shape[0])
        own = by_rows[: end - first]
        norm_silu_backward(grad[first:end], normed[first:end], factors[first:end], scale, own, by_scale, by_bias)
        if by_weight.shape[0]:
            add_outer(own, x[first:end], by_weight)
        if by_x.shape[0]:
            product(own, weight, by_x[first:end])

"""Products of small layers on the CPU, as parts of kernels: see `rl_lab.nn.host_kernels`.

Nothing of them holds Python's lock: threads can share the rows. They are BLAS's, by the way that Numba's own take (it
needs SciPy), or of `rl_lab.nn.tile_kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_lab.nn.fusion import has_numba
from rl_lab.nn.host_kernels import inline, part
from rl_lab.nn.host_mlp import ONE_THREAD
from rl_lab.nn.tile_kernels import has_tiles, stride, tiled_product

MOST_ROWS = 64  # at once: with more, they and what comes of them would not stay in the cache
SMALL = ONE_THREAD // 2  # numbers of a weight, for two rows at once

_TILED = has_tiles()
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
    rows = MOST_ROWS if _TILED else min(MOST_ROWS, ONE_THREAD // weight.size)
    return rows - rows % (4 if rows >= 4 else 2)


@part
def _multiply(x: Any, weight: Any, add: Any, out: Any) -> None:
    inner, outputs = weight.shape
    if _TILED:
        tiled_product(x, stride(x), 1, weight, add, out)
        return
    step, beta = rows_at_once(weight), _ONE if add else _ZERO
    for first in range(0, x.shape[0], step):
        own, target = x[first : first + step], out[first : first + step]
        _gemm(_SINGLE, _PLAIN, _PLAIN, outputs, own.shape[0], inner, _ONE.ctypes, weight.ctypes, stride(weight),
              own.ctypes, stride(own), beta.ctypes, target.ctypes, stride(target))  # fmt: skip


@part
def product(x: Any, weight: Any, out: Any) -> None:
    """out = x @ weight; of `x` the first columns count. The numbers of a row lie side by side in all three."""
    _multiply(x, weight, False, out)


@part
def add_product(x: Any, weight: Any, out: Any) -> None:
    """out += x @ weight."""
    _multiply(x, weight, True, out)


@part
def add_outer(left: Any, right: Any, out: Any) -> None:
    """out += leftᵀ @ right, of as many rows as there are at once for `out`: sums over them."""
    if _TILED:
        tiled_product(left, 1, stride(left), right, True, out)
        return
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
def set_rows(out: Any, row: Any) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = row[j]

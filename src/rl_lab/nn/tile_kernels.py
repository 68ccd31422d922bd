"""Products of small matrices on the CPU as vector code of our own: see `rl_lab.nn.host_kernels`.

A tile of the result stays in registers, while the inner axis goes by and a fused multiply-add takes it in. Every number
of the result is summed in the order of the inner axis, wherever it stands in a tile, so that a row gives the same
numbers in any company.

OpenBLAS packs both matrices in every call, which products of this size do not repay, unless it has kernels for small
ones: with AVX-512.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from rl_lab.nn.fusion import has_numba
from rl_lab.nn.host_kernels import inline, part

LANES = 8  # numbers of a vector
ROWS, COLUMNS = 4, 2 * LANES  # of a tile: as many sums as keep the multipliers of these processors busy


@cache
def has_tiles() -> bool:
    """Whether this processor should multiply by tiles: with vectors of eight and multiply-adds, but no longer ones."""
    if not has_numba():
        return False
    from llvmlite.binding import get_host_cpu_features

    try:
        features = get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on every system
        return False
    return features.get("fma", False) and not features.get("avx512f", False)


if has_numba():
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    _vector = ir.VectorType(ir.FloatType(), LANES)
    _numbers = types.CPointer(types.float32)

    def _find(typing_context: Any, array: Any, first: Any) -> Any:
        """Where the numbers of an array lie, from the given one on. It does not keep the array."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.gep(data, [arguments[1]])

        return _numbers(array, types.intp), generate

    _address: Any = intrinsic(_find)

    def _tile_of(rows: int) -> Any:
        """The kernel of tiles with so many rows."""

        @intrinsic
        def tile(
            typing_context: Any, left: Any, left_first: Any, left_row: Any, left_inner: Any, right: Any,
            right_inner: Any, inner: Any, out: Any, out_first: Any, out_row: Any, add: Any,
        ) -> Any:  # fmt: skip
            """out = left @ right, or added to it; `left_row`, `left_inner` and so on are steps between numbers."""

            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                left, left_first, left_row, left_inner, right, right_inner, inner, out, out_first, out_row, add = (
                    arguments
                )
                kind = ir.FunctionType(_vector, [_vector] * 3)
                multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
                halves = [ir.Constant(inner.type, LANES * half) for half in range(2)]

                def vector(start: Any) -> Any:
                    return builder.bitcast(start, _vector.as_pointer())

                sums = [[cgutils.alloca_once_value(builder, ir.Constant(_vector, None)) for _ in halves]
                        for _ in range(rows)]  # fmt: skip
                lefts, targets = [builder.gep(left, [left_first])], [builder.gep(out, [out_first])]
                for _ in range(1, rows):
                    lefts.append(builder.gep(lefts[-1], [left_row]))
                    targets.append(builder.gep(targets[-1], [out_row]))
                with cgutils.for_range(builder, inner) as loop:
                    start = builder.gep(right, [builder.mul(loop.index, right_inner)])
                    factors = [builder.load(vector(builder.gep(start, [half])), align=4) for half in halves]
                    for row, own in zip(lefts, sums, strict=True):
                        number = builder.load(builder.gep(row, [builder.mul(loop.index, left_inner)]))
                        single = builder.insert_element(
                            ir.Constant(_vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
                        )
                        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
                        spread = builder.shuffle_vector(single, ir.Constant(_vector, ir.Undefined), everywhere)
                        for total, factor in zip(own, factors, strict=True):
                            builder.store(builder.call(multiply_add, [spread, factor, builder.load(total)]), total)
                for target, own in zip(targets, sums, strict=True):
                    for total, half in zip(own, halves, strict=True):
                        place, result = vector(builder.gep(target, [half])), builder.load(total)
                        with builder.if_else(add) as (added, stored):
                            with added:
                                builder.store(builder.fadd(builder.load(place, align=4), result), place, align=4)
                            with stored:
                                builder.store(result, place, align=4)
                return context.get_dummy_value()

            size = types.intp
            return types.void(
                _numbers, size, size, size, _numbers, size, size, _numbers, size, size, types.boolean
            ), generate  # fmt: skip

        return tile

    _tile, _row = _tile_of(ROWS), _tile_of(1)


@inline
def stride(x: Any) -> Any:
    """From a row to the next one; a single row may say anything."""
    return max(x.strides[0] // 4, x.shape[1])


@part
def _tiles(
    left: Any, left_row: Any, left_inner: Any, right: Any, right_first: Any, inner: Any, add: Any, out: Any,
    out_first: Any,
) -> None:  # fmt: skip
    """As many columns as a tile has, of all rows: in `right` and `out` from the given ones on."""
    given, seen, target = _address(left, 0), _address(right, right_first), _address(out, out_first)
    (rows, _), right_row, out_row = out.shape, stride(right), stride(out)
    whole = rows - rows % ROWS
    for i in range(0, whole, ROWS):
        _tile(given, i * left_row, left_row, left_inner, seen, right_row, inner, target, i * out_row, out_row, add)
    for i in range(whole, rows):
        _row(given, i * left_row, left_row, left_inner, seen, right_row, inner, target, i * out_row, out_row, add)


@part
def tiled_product(left: Any, left_row: Any, left_inner: Any, right: Any, add: Any, out: Any) -> None:
    """out = left @ right, or added to it. Of `left` the steps between rows and along the inner axis are given, so that
    it may be transposed; `right` is [inner, columns], and the numbers of its rows and of those of `out` lie side by
    side."""
    (inner, columns), (rows, _) = right.shape, out.shape
    whole = columns - columns % COLUMNS
    for first in range(0, whole, COLUMNS):
        _tiles(left, left_row, left_inner, right, first, inner, add, out, first)
    if whole == columns:
        return
    # The last columns: of a tile that begins before them or, in a narrow matrix, ends after them.
    edge, start = np.empty((rows, COLUMNS), np.float32), max(columns - COLUMNS, 0)
    if whole:
        _tiles(left, left_row, left_inner, right, start, inner, False, edge, 0)
    else:
        wider = np.zeros((inner, COLUMNS), np.float32)
        wider[:, :columns] = right
        _tiles(left, left_row, left_inner, wider, 0, inner, False, edge, 0)
    for i in range(rows):
        for j in range(whole, columns):
            out[i, j] = out[i, j] + edge[i, j - start] if add else edge[i, j - start]

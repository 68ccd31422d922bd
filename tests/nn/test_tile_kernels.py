"""Products by tiles against float64. They are tested on any processor, whether or not it multiplies by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
import llvmlite.binding
from numba import njit

from rl_lab.nn import tile_kernels

# Whole tiles; rows, columns or both that are left over; fewer than a tile has; and a single number.
SHAPES = [(8, 12, 32), (7, 5, 16), (4, 3, 37), (6, 20, 63), (64, 192, 20), (3, 7, 4), (1, 1, 1)]


@njit
def multiply(left: Any, right: Any, add: Any, out: Any) -> None:
    tile_kernels.tiled_product(left, tile_kernels.stride(left), 1, right, add, out)


@njit
def multiply_transposed(left: Any, right: Any, add: Any, out: Any) -> None:
    tile_kernels.tiled_product(left, 1, tile_kernels.stride(left), right, add, out)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products(rows: int, inner: int, columns: int, add: bool) -> None:
    """Plain and transposed, of matrices that are parts of wider ones; what lies beside the result stays."""
    wide, right = numbers(rows, inner + 3), numbers(inner, columns + 2)[:, :columns]
    left, exact = wide[:, :inner], wide[:, :inner].astype(np.float64) @ right.astype(np.float64)
    for call, given in ((multiply, left), (multiply_transposed, np.ascontiguousarray(left.T))):
        around = numbers(rows, columns + 5)
        before = around.copy()
        call(given, right, add, around[:, 2 : columns + 2])
        expected = exact + before[:, 2 : columns + 2] if add else exact
        np.testing.assert_allclose(around[:, 2 : columns + 2], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(around[:, :2], before[:, :2])
        np.testing.assert_array_equal(around[:, columns + 2 :], before[:, columns + 2 :])


@pytest.mark.parametrize("columns", [16, 37, 5])
def test_a_row_gives_the_same_in_any_company(columns: int) -> None:
    """To the last bit, alone or among others, in a tile or left over: threads may share rows in any way."""
    left, right = np.repeat(numbers(1, 50), 11, axis=0), numbers(50, columns)
    out, alone = np.empty((11, columns), np.float32), np.empty((1, columns), np.float32)
    multiply(left, right, False, out)
    multiply(left[:1], right, False, alone)
    np.testing.assert_array_equal(out, np.repeat(alone, 11, axis=0))


@pytest.mark.parametrize(
    ("features", "expected"),
    [({"fma": True, "avx2": True}, True), ({"fma": True, "avx512f": True}, False), ({"sse2": True}, False)],
)
def test_where_tiles_are_used(monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], expected: bool) -> None:
    """Not where OpenBLAS has kernels for small products, and not where multiply-adds are calls."""
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: features)
    assert tile_kernels.has_tiles.__wrapped__() is expected


def test_without_knowing_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM may not be able to tell; products are BLAS's then."""

    def fail() -> dict[str, bool]:
        raise RuntimeError("unsupported")

    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", fail)
    assert tile_kernels.has_tiles.__wrapped__() is False

"""How products of small layers are called."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")
from rl_lab.nn import layer_kernels as kernels
from rl_lab.nn.host_mlp import ONE_THREAD
from rl_lab.nn.tile_kernels import has_tiles


def test_products_take_as_many_rows_as_one_thread_of_blas_does() -> None:
    """And an even number of them."""
    for size in (1 << 8, 1 << 13, kernels.SMALL):
        weight = np.empty((size // 16, 16), np.float32)
        rows = kernels.rows_at_once(weight)
        assert rows % 2 == 0
        assert rows > 0
        assert has_tiles() or rows * weight.size <= ONE_THREAD
        assert kernels.is_small(weight)
    assert not kernels.is_small(np.empty((kernels.SMALL // 16 + 1, 16), np.float32))

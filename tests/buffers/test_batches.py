"""The memory that batches are gathered into."""

from __future__ import annotations

import numpy as np

from rl_lab.buffers.batches import CACHE_LINE, ArrayPool

SHAPE = (40, 60, 60)  # large enough for the pool


def test_memory_begins_at_a_line_of_the_cache() -> None:
    """Copies into memory that begins elsewhere are slower."""
    pool = ArrayPool()
    arrays = [pool.take(SHAPE, dtype) for dtype in ("uint8", "float32", "uint8", "int64")]
    assert [array.ctypes.data % CACHE_LINE for array in arrays] == [0] * 4
    assert [(array.shape, str(array.dtype)) for array in arrays[1:3]] == [(SHAPE, "float32"), (SHAPE, "uint8")]


def test_a_part_of_an_array_keeps_its_memory() -> None:
    """Memory is given out again when neither the array nor a view of a part of it is left."""
    pool = ArrayPool()
    part = pool.take(SHAPE, "uint8")[3:, 1]
    part[:] = 7
    others = [pool.take(SHAPE, "uint8") for _ in range(2)]
    for other in others:
        other[:] = 0
    assert (part == 7).all()
    address = part.ctypes.data
    del part, others, other
    free = pool.take(SHAPE, "uint8")
    assert np.shares_memory(free, free[3:, 1])
    assert free[3:, 1].ctypes.data == address

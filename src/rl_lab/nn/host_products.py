"""Products of many rows with a small matrix on the CPU, where nothing needs a gradient.

NumPy's BLAS computes small products faster than torch's on some processors, and takes one thread for them: so where
torch may take one thread only, many rows go through NumPy in parts that are small enough.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.nn.host_mlp import ONE_THREAD

MANY_ROWS = 1024  # fewer are not worth the calls
TILE = 8  # a part has a multiple of so many rows


def product(
    x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "inputs outputs"], *, out: Tensor | None = None
) -> Float[Tensor, "rows outputs"]:
    """x @ weight, on the CPU and in full precision."""
    rows, part = len(x), ONE_THREAD // weight.numel() // TILE * TILE
    if rows < MANY_ROWS or part == 0 or torch.get_num_threads() > 1:
        return torch.mm(x, weight, out=out)
    out = x.new_empty(rows, weight.shape[1]) if out is None else out
    matrix, left, result = np.ascontiguousarray(weight.numpy()), x.numpy(), out.numpy()
    whole = rows - rows % part
    parts = (array[:whole].reshape(-1, part, array.shape[1]) for array in (left, result))
    np.matmul(next(parts), matrix, out=next(parts))
    np.matmul(left[whole:], matrix, out=result[whole:])
    return out


def affine(x: Tensor, weight: Tensor, bias: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x @ weight + bias, likewise."""
    if len(x) < MANY_ROWS:
        return torch.addmm(bias, x, weight, out=out)
    return product(x, weight, out=out).add_(bias)

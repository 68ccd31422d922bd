"""Products of many rows with a small matrix on the CPU, where nothing needs a gradient.

NumPy's BLAS computes small products faster than torch's on some processors, and takes one thread for them: so where
torch may take one thread only, many rows go through NumPy in parts that are small enough.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.nn.host_mlp import ONE_THREAD, Array

MANY_ROWS = 64  # from so many on it pays to lay the matrix out anew
TILE = 8  # a part has a multiple of so many rows


def multiply(
    x: Float[Array, "rows inputs"], weight: Float[Array, "inputs outputs"], out: Float[Array, "rows outputs"]
) -> Float[Array, "rows outputs"]:
    """out = x @ weight."""
    rows, part = len(x), ONE_THREAD // weight.size // TILE * TILE
    if rows * weight.size <= ONE_THREAD:
        return np.matmul(x, weight, out=out)
    if part == 0 or torch.get_num_threads() > 1:
        torch.mm(torch.from_numpy(x), torch.from_numpy(weight), out=torch.from_numpy(out))
        return out
    whole = rows - rows % part
    parts = (array[:whole].reshape(-1, part, array.shape[1]) for array in (x, out))
    np.matmul(next(parts), weight, out=next(parts))
    if whole < rows:
        np.matmul(x[whole:], weight, out=out[whole:])
    return out


def laid_out(weight: Float[Array, "inputs outputs"], rows: int) -> Float[Array, "inputs outputs"]:
    """The matrix for products with so many rows."""
    return np.ascontiguousarray(weight) if rows >= MANY_ROWS else weight


def array_product(
    x: Float[Array, "rows inputs"], weight: Float[Array, "inputs outputs"]
) -> Float[Array, "rows outputs"]:
    """x @ weight."""
    rows = x.shape[0]
    return multiply(x, laid_out(weight, rows), np.empty((rows, weight.shape[1]), x.dtype))


def affine(
    x: Float[Tensor, "*lead inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"]
) -> Float[Tensor, "*lead outputs"]:
    """x @ weightᵀ + bias, without a gradient."""
    rows = x.detach().numpy()
    out = array_product(rows.reshape(-1, rows.shape[-1]), weight.detach().numpy().T)
    out += bias.detach().numpy()
    return torch.from_numpy(out.reshape(*rows.shape[:-1], -1))

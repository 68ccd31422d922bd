"""The kernels of small layers against torch in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba")
from rl_lab.nn import layer_kernels as kernels

EPS = 1e-4


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((*shape, seed)).normal(size=shape).astype(np.float32)


def exact(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array).double().requires_grad_() for array in arrays]


# The second: more rows than go through at once. The last: a single row, and a single output.
SHAPES = [(5, 6, 8), (150, 192, 64), (70, 512, 63), (1, 3, 1)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_linear_layer(rows: int, inputs: int, outputs: int) -> None:
    """Outputs and every derivative; those by weight and bias are added to what is there."""
    x, weight, bias, grad = numbers(rows, inputs), numbers(outputs, inputs), numbers(outputs), numbers(rows, outputs)
    given = exact(x, weight, bias)
    expected = F.linear(*given)
    wanted = torch.autograd.grad((expected * torch.from_numpy(grad)).sum(), given)
    out, by_x = np.empty_like(grad), np.empty_like(x)
    by_weight, by_bias = np.ones_like(weight), np.ones_like(bias)
    kernels.linear(x, np.ascontiguousarray(weight.T), bias, out)
    kernels.linear_backward(grad, weight, x, by_x, by_weight, by_bias)
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-4, atol=1e-4)
    for result, right in zip((by_x, by_weight - 1, by_bias - 1), wanted, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_normed_layer(rows: int, inputs: int, outputs: int) -> None:
    """The same, with and without what the derivative needs; derivatives that are not wanted are left out."""
    x, weight, grad = numbers(rows, inputs), numbers(outputs, inputs), numbers(rows, outputs)
    bias, scale = numbers(outputs), numbers(outputs, seed=1)
    given = exact(x, weight, bias, scale)
    pre = F.linear(*given[:3])
    expected = F.silu(F.rms_norm(pre, (outputs,), given[3], EPS))
    wanted = torch.autograd.grad((expected * torch.from_numpy(grad)).sum(), given)
    (out, kept_out, normed), factors = np.empty((3, rows, outputs), np.float32), np.empty(rows, np.float32)
    laid_out = np.ascontiguousarray(weight.T)
    kernels.normed_layer(x, laid_out, bias[None], scale[None], EPS, out)
    kernels.normed_layer_kept(x, laid_out, bias, scale, EPS, normed, factors, kept_out)
    for result in (out, kept_out):
        np.testing.assert_allclose(result, expected.detach(), rtol=1e-4, atol=1e-4)
    by_x, by_weight, nothing = np.empty_like(x), np.zeros_like(weight), np.empty((0, 0), np.float32)
    by_bias, by_scale = np.zeros_like(bias), np.zeros_like(scale)
    seen = grad, normed, factors, scale, weight, x
    kernels.normed_layer_backward(*seen, by_x, by_weight, by_bias, by_scale)
    for result, right in zip((by_x, by_weight, by_bias, by_scale), wanted, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-3, atol=1e-3)
    again, sums = np.empty_like(x), [np.zeros_like(bias), np.zeros_like(scale)]
    kernels.normed_layer_backward(*seen, again, nothing, *sums)
    np.testing.assert_array_equal(again, by_x)
    kernels.normed_layer_backward(*seen, nothing, by_weight, *sums)
    np.testing.assert_allclose(by_weight, 2 * wanted[1], rtol=1e-3, atol=1e-3)


def test_products_take_as_many_rows_as_one_thread_of_blas_does() -> None:
    """And an even number of them."""
    for size in (1 << 8, 1 << 13, kernels.SMALL):
        weight = np.empty((size // 16, 16), np.float32)
        rows = kernels.rows_at_once(weight)
        assert rows % 2 == 0
        assert 0 < rows * weight.size <= kernels.MOST_MULTIPLICATIONS
        assert kernels.is_small(weight)
    assert not kernels.is_small(np.empty((kernels.SMALL // 16 + 1, 16), np.float32))


def test_compiled_code_is_that_of_all_files() -> None:
    """A change in any file with parts of kernels makes all of them new: one that was kept would have the old parts."""
    kernels.linear(*(numbers(4, 4) for _ in range(2)), numbers(4), np.empty((4, 4), np.float32))
    kept = kernels.linear._cache._cache_file
    assert kept._load_index()
    assert {"host_kernels.py", "layer_kernels.py", "dream_kernel.py", "host_blas.py"} <= {
        name for name, *_ in kept._source_stamp
    }
    base = Path(kept._index_path).stem
    assert type(kept)(kept._cache_path, base, kept._source_stamp)._load_index()
    assert not type(kept)(kept._cache_path, base, kept._source_stamp[1:])._load_index()


FRESH = """
import hashlib
import numpy as np
from rl_lab.nn.layer_kernels import normed_layer
x, weight, rows = (np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) for _ in range(3))
normed_layer(x, weight, rows[:1], rows[1:2], np.float32(1e-4), out := np.empty_like(x))
print(hashlib.sha256(out.tobytes()).hexdigest())
"""


def test_compiled_code_rounds_as_it_does_when_it_is_loaded_again(tmp_path: Path) -> None:
    """A run that goes on in another process finds the kernels compiled, and must get the same numbers."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FRESH]
    fresh, loaded = (subprocess.check_output(command, env=environment, text=True) for _ in range(2))
    assert any(tmp_path.rglob("*.nbi"))
    assert loaded == fresh

"""Networks of small and of large layers against torch in float64, and how their kernels are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba")
from rl_lab.nn import normed_layers as stacks
from rl_lab.nn import stack_kernels as kernels
from rl_lab.nn.host_threads import rows_shared
from rl_lab.nn.layer_kernels import MOST_ROWS, SMALL
from rl_lab.nn.normed_layers import LastLayer, LayerTensors, normed_layers

EPS = 1e-4
# The last: a single row, and single numbers.
SHAPES = [(5, [6, 8]), (MOST_ROWS * 2 + 22, [192, 64, 63, 64]), (70, [512, 63]), (70, [6] * 6), (1, [3, 1])]
LARGE = (stacks.BLOCK + 10, [SMALL // 64 + 1, 64, 8])


def a_network(rows: int, sizes: list[int]) -> tuple[torch.Tensor, list[LayerTensors], LastLayer]:
    """Rows for it, its layers, and one that may follow."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    layers = [LayerTensors(numbers(size, inputs), numbers(size), numbers(size)) for inputs, size in pairwise(sizes)]
    return 10.0 * numbers(rows, sizes[0]), layers, LastLayer(numbers(7, sizes[-1]), numbers(7))


def plain(x: torch.Tensor, layers: list[LayerTensors], last: LastLayer | None) -> torch.Tensor:
    for weight, bias, scale in layers:
        x = F.silu(F.rms_norm(F.linear(x, weight, bias), bias.shape, scale, EPS))
    return x if last is None else F.linear(x, *last)


@pytest.mark.parametrize("ends", [True, False], ids=["a last layer", "none"])
@pytest.mark.parametrize(("rows", "sizes"), [*SHAPES, LARGE])
def test_outputs_and_derivatives(rows: int, sizes: list[int], ends: bool) -> None:
    """By the rows and by every tensor, where these are wanted."""
    x, layers, end = a_network(rows, sizes)
    last = end if ends else None
    tensors = [x, *(own for layer in layers for own in layer), *(end if ends else ())]
    exact = [own.double().requires_grad_() for own in tensors]
    stop = 1 + 3 * len(layers)
    exact_layers = [LayerTensors(*exact[at : at + 3]) for at in range(1, stop, 3)]
    expected = plain(exact[0], exact_layers, LastLayer(*exact[stop:]) if ends else None)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    right = torch.autograd.grad(expected, exact, grad.double())

    def check(*, wanted: list[bool]) -> None:
        for own, needed in zip(tensors, wanted, strict=True):
            own.requires_grad_(needed)
            own.grad = None
        result = normed_layers(x, layers, EPS, last)
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
        result.backward(grad)
        for own, needed, value in zip(tensors, wanted, right, strict=True):
            assert (own.grad is not None) == needed
            if own.grad is not None:
                torch.testing.assert_close(own.grad.double(), value, rtol=1e-3, atol=1e-3)

    check(wanted=[True] * len(tensors))
    check(wanted=[False] + [True] * (len(tensors) - 1))
    check(wanted=[True] + [False] * (len(tensors) - 1))
    check(wanted=[number % 2 == 0 for number in range(len(tensors))])
    with torch.no_grad():
        torch.testing.assert_close(normed_layers(x, layers, EPS, last).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [[6, 16, 16], LARGE[1]], ids=["small", "large"])
def test_threads_share_the_rows(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row gives the same in any thread; sums over rows differ by rounding."""
    x, layers, last = a_network(1200, sizes)
    tensors = [x.requires_grad_(), *(own.requires_grad_() for layer in layers for own in layer)]
    alone = normed_layers(x, layers, EPS, last)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with rows_shared():
        shared = normed_layers(x, layers, EPS, last)
        by_shared = torch.autograd.grad(shared.sum(), tensors)
    torch.testing.assert_close(shared, alone)
    torch.testing.assert_close(by_shared, torch.autograd.grad(alone.sum(), tensors), rtol=1e-3, atol=1e-3)


def test_networks_of_few_layers_share_their_kernels() -> None:
    """For tuples of another length they would be compiled anew."""
    for count in range(1, kernels.LENGTH + 1):
        records = tuple(kernels.LinearArrays(np.empty((1, 1)), np.empty(1)) for _ in range(count))
        assert len(kernels.padded(records)) == kernels.LENGTH
        assert kernels.padded(records)[:count] == records
    assert len(kernels.padded(records * 2)) == 2 * kernels.LENGTH


def test_compiled_code_is_that_of_all_files() -> None:
    """A change in any file with parts of kernels makes all of them new: one that was kept would have the old parts."""
    x, layers, _ = a_network(4, [4, 4])
    with torch.no_grad():
        normed_layers(x, layers, EPS)
    kept = kernels.forward._cache._cache_file
    assert kept._load_index()
    assert {"host_kernels.py", "layer_kernels.py", "dream_kernel.py", "tile_kernels.py", "stack_kernels.py"} <= {
        name for name, *_ in kept._source_stamp
    }
    base = Path(kept._index_path).stem
    assert type(kept)(kept._cache_path, base, kept._source_stamp)._load_index()
    assert not type(kept)(kept._cache_path, base, kept._source_stamp[1:])._load_index()


def test_compiled_code_of_a_record_that_is_gone_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update that renames a class, what was compiled for it before cannot be read: it is compiled anew."""
    x, layers, _ = a_network(4, [4, 4])
    with torch.no_grad():
        normed_layers(x, layers, EPS)
    kept = kernels.forward._cache._cache_file
    assert kept._load_index()
    monkeypatch.delattr(kernels, "LayerArrays")
    assert kept._load_index() == {}


FRESH = """
import hashlib
import torch
from rl_lab.nn.normed_layers import LayerTensors, normed_layers
x, weight, rows = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    out = normed_layers(x, [LayerTensors(weight, rows[0], rows[1])], 1e-4)
print(hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


def test_compiled_code_rounds_as_it_does_when_it_is_loaded_again(tmp_path: Path) -> None:
    """A run that goes on in another process finds the kernels compiled, and must get the same numbers."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FRESH]
    fresh, loaded = (subprocess.check_output(command, env=environment, text=True) for _ in range(2))
    assert any(tmp_path.rglob("*.nbi"))
    assert loaded == fresh

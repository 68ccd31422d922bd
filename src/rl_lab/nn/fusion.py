"""Where the kernels of our own can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Fusable(Protocol):
    """A part of a model that may have kernels of its own. They need no compiler; the plain layers are the reference."""

    def fuse(self) -> bool:
        """Use them from now on. False: there are none for it, or none for its device."""

    def rehearse(self, dtype: torch.dtype) -> None:
        """Compile them, for computing in `dtype`, so that the first call need not."""


def fused(module: nn.Module) -> Fusable | None:
    """The module, if it uses kernels of its own from now on."""
    return module if isinstance(module, Fusable) and module.fuse() else None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel; with tensors that have no memory (`meta`) it is compiled only."""
    if arguments[0].is_meta:
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


def has_triton(tensor: Tensor) -> bool:
    """Whether it lies on a GPU, where Triton's kernels can run."""
    return tensor.is_cuda and _is_installed("triton")


def has_numba() -> bool:
    """Whether the kernels for the CPU can run. Without Numba, and SciPy for its products, the plain forms do their
    work."""
    return _is_installed("numba") and _is_installed("scipy")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def uses_kernels(fused: bool) -> bool:
    """Whether a fused module calls kernels that have no derivative now; the compiler makes kernels of its own."""
    return fused and not torch.is_grad_enabled() and not torch.compiler.is_compiling()

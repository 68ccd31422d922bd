"""Where the kernels of our own can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Fusable(Protocol):
    """A part of a model that may have kernels of its own. They need no compiler; the plain layers are the reference."""

    def fuse(self) -> bool:
        """Use them from now on. False: there are none for it, or none for its device."""


def fuse(module: nn.Module) -> bool:
    return isinstance(module, Fusable) and module.fuse()


def has_triton(tensor: Tensor) -> bool:
    """Whether it lies on a GPU, where Triton's kernels can run."""
    return tensor.is_cuda and _is_installed("triton")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None

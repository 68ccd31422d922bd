"""Where the kernels of our own can run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class Fusable(Protocol):
    """A part of a model that may have kernels of its own. They need no compiler; the plain layers are the reference."""

    def fuse(self) -> bool:
        """Use them from now on. False: there are none for it, or none for its device."""


def fuse(module: nn.Module) -> bool:
    return isinstance(module, Fusable) and module.fuse()


def has_triton(module: nn.Module) -> bool:
    """Whether a module lies on a GPU that Triton's kernels run on."""
    return next(module.parameters()).is_cuda and find_spec("triton") is not None

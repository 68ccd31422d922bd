"""A small model with a kernel of its own, for tests of the registry."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.kernels.catalogue import Kernel
from rl_lab.kernels.registry import Accelerated

NAME = "tests.kernels.small_model"
CALLS: list[str] = []  # of the kernel


class Small(Accelerated):
    """y = 2·tanh(W x)"""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(size, size), size

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels and (kernel := self.kernel("forward")) is not None:
            return kernel(self, x)
        return 2.0 * self.squash(self.layer(x))

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def describe(self) -> str:
        return "small"


class Steeper(Small):
    """Computes something else."""

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(3.0 * x)


class Named(Small):
    """Computes the same, but does not say so."""

    def describe(self) -> str:
        return "named"


class Unchanged(Small):
    """Says so."""

    kernels_hold = True

    def describe(self) -> str:
        return "unchanged"


class BelowUnchanged(Unchanged):
    """What a parent says of itself does not hold for a class below it."""


def fast(small: Small, x: Tensor) -> Tensor:
    """What the plain method computes, and a note that it was this one."""
    CALLS.append("fast")
    return 2.0 * torch.tanh(small.layer(x))


def supports_fast(small: Small) -> str | None:
    return None if small.size < 8 else "it is too large"


KERNEL = Kernel(
    f"{NAME}.Small", "forward", "cpu", f"{NAME}:fast", mirrors=(f"{NAME}.Small.forward", f"{NAME}.Small.squash"),
    parts=("torch.nn.modules.linear.Linear",),
)  # fmt: skip

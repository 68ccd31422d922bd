"""Weights in the precision that they are used in."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def planning_dtype(device: torch.device, autocast_dtype: torch.dtype | None) -> torch.dtype | None:
    """float16 where products may have short mantissas: it has those of TF32, and takes half as long. Else none."""
    short = autocast_dtype is not None or torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if short and device.type == "cuda" else None


class WorkingCopies:
    """Copies of modules with their weights in `dtype`, for loops without gradients.

    Autocast casts a weight wherever it is used: a loop casts all of them in every step. The copies are cast once
    for the loop, by `refresh`. Norms keep their precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, module: Module) -> Module:
        """The copy of a module. It runs its plain methods: kernels were chosen for the original's precision."""
        twin = copy.deepcopy(module)
        for part in twin.modules():
            if hasattr(part, "kernels"):
                setattr(part, "kernels", {})  # noqa: B010  # a plain attribute, which torch's stubs do not know
            if not isinstance(part, nn.LayerNorm) and not getattr(part, "full_precision", False):
                for value in part.parameters(recurse=False):
                    value.data = value.data.to(self.dtype)
        twin.requires_grad_(False)
        self._sources += module.parameters()
        self._targets += twin.parameters()
        return twin

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the present weights."""
        if len(self._targets) > 0:
            torch._foreach_copy_(self._targets, self._sources)

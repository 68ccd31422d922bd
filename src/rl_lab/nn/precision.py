"""Weights in the precision that they are used in."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from rl_lab.nn.layers import RMSNorm

Module = TypeVar("Module", bound=nn.Module)


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
        """The copy of a module."""
        twin = copy.deepcopy(module).requires_grad_(False)
        for part in twin.modules():
            if not isinstance(part, RMSNorm | nn.LayerNorm):
                for value in part.parameters(recurse=False):
                    value.data = value.data.to(self.dtype)
        self._sources += list(module.parameters())
        self._targets += list(twin.parameters())
        return twin

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the present weights."""
        torch._foreach_copy_(self._targets, self._sources)

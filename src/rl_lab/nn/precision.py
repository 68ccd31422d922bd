"""Weights in the precision that they are used in."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from rl_lab.nn.layers import RMSNorm
from rl_lab.nn.member_mlp import MemberLinear

Module = TypeVar("Module", bound=nn.Module)


class WorkingCopies:
    """Copies of modules with their weights in `dtype`, for loops without gradients.

    Autocast casts a weight wherever it is used: a loop casts all of them in every step. The copies are cast once
    for the loop, by `refresh`. Norms keep their precision. `multiple`: sizes of batched layers are padded to it.
    """

    def __init__(self, dtype: torch.dtype, *, multiple: int = 1) -> None:
        self.dtype, self.multiple = dtype, multiple
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._padded: list[tuple[Tensor, Tensor]] = []  # what is copied and where to, by themselves

    def add(self, module: Module) -> Module:
        """The copy of a module."""
        twin = copy.deepcopy(module)
        for part in twin.modules():
            if isinstance(part, MemberLinear):
                part.pad(self.multiple)
            if not isinstance(part, RMSNorm | nn.LayerNorm):
                for value in part.parameters(recurse=False):
                    value.data = value.data.to(self.dtype)
        twin.requires_grad_(False)
        for source, target in zip(module.parameters(), twin.parameters(), strict=True):
            if source.shape == target.shape:
                self._sources.append(source)
                self._targets.append(target)
            else:
                self._padded.append((source, target[tuple(slice(size) for size in source.shape)]))
        return twin

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the present weights."""
        torch._foreach_copy_(self._targets, self._sources)
        for source, target in self._padded:
            target.copy_(source)

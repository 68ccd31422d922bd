"""Weights in the precision that they are used in."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from rl_lab.kernels.graphs import Watch
from rl_lab.kernels.registry import Accelerated

Module = TypeVar("Module", bound=nn.Module)


class WorkingCopies:
    """Copies of modules with their weights in `dtype`, for loops without gradients.

    Autocast casts a weight wherever it is used: a loop casts all of them in every step. The copies are cast once
    for the loop, by `refresh`. Norms keep their precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._originals: list[nn.Module] = []
        self._copies: list[nn.Module] = []

    def add(self, module: Module) -> Module:
        """The copy of a module. It runs its plain methods: kernels were chosen for the original's precision."""
        twin = self._copied(module)
        self._originals.append(module)
        self._copies.append(twin)
        self._note()
        return twin

    @torch.no_grad()
    def refresh(self) -> bool:
        """Take over the present weights. Where an original got or lost a hook, a layer or a method since, the copies
        become copies of what it is now; whether they did."""
        changed = self._watch.changed()
        if changed:
            for module, twin in zip(self._originals, self._copies, strict=True):
                fresh = self._copied(module)
                twin.__class__ = fresh.__class__
                vars(twin).clear()
                vars(twin).update(vars(fresh))
            self._note()
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)
        return changed

    def _copied(self, module: Module) -> Module:
        twin = copy.deepcopy(module)
        for part in twin.modules():
            if isinstance(part, Accelerated):
                part.kernels = {}
            if not isinstance(part, nn.LayerNorm) and not getattr(part, "full_precision", False):
                for value in part.parameters(recurse=False):
                    value.data = value.data.to(self.dtype)
        return twin.requires_grad_(False)

    def _note(self) -> None:
        self._watch = Watch(self._originals)
        self._sources: list[Tensor] = [value for module in self._originals for value in module.parameters()]
        self._targets: list[Tensor] = [value for twin in self._copies for value in twin.parameters()]

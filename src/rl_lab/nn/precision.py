"""Weights in the precision that they are used in."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.nn.layers import RMSNorm
from rl_lab.nn.member_mlp import MemberLinear

Module = TypeVar("Module", bound=nn.Module)
TENSOR_CORE_MULTIPLE = 8  # sizes of 16-bit matrices that the units for products of a GPU take whole


def planning_dtype(device: torch.device, autocast_dtype: torch.dtype | None) -> torch.dtype | None:
    """float16 where products may have short mantissas: it has those of TF32, and takes half as long. Else none."""
    short = autocast_dtype is not None or torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if short and device.type == "cuda" else None


class PaddedLinear(nn.Module):
    """A copy of a dense layer with zeros up to multiples of a size: 16-bit matrices are multiplied fastest so."""

    def __init__(self, layer: nn.Linear, multiple: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        inputs, outputs = -layer.in_features % multiple, -layer.out_features % multiple
        self.weight = nn.Parameter(F.pad(layer.weight.detach(), (0, inputs, 0, outputs)))
        bias = layer.bias
        self.bias = nn.Parameter(F.pad(bias.detach(), (0, outputs))) if bias is not None else None

    def forward(self, x: Float[Tensor, "*lead inputs"]) -> Float[Tensor, "*lead outputs"]:
        spare = self.weight.shape[1] - x.shape[-1]
        x = F.linear(F.pad(x, (0, spare)) if spare else x, self.weight, self.bias)
        return x if x.shape[-1] == self.out_features else x[..., : self.out_features]


class WorkingCopies:
    """Copies of modules with their weights in `dtype`, for loops without gradients.

    Autocast casts a weight wherever it is used: a loop casts all of them in every step. The copies are cast once
    for the loop, by `refresh`. Norms keep their precision. `multiple`: sizes of dense layers are padded to it.
    """

    def __init__(self, dtype: torch.dtype, *, multiple: int = 1) -> None:
        self.dtype, self.multiple = dtype, multiple
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._padded: list[tuple[Tensor, Tensor]] = []  # what is copied and where to, by themselves

    def add(self, module: Module) -> Module:
        """The copy of a module."""
        twin = copy.deepcopy(module)
        for part in list(twin.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.Linear) and any(size % self.multiple for size in child.weight.shape):
                    setattr(part, name, PaddedLinear(child, self.multiple))
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
        if len(self._targets) > 0:
            torch._foreach_copy_(self._targets, self._sources)
        for source, target in self._padded:
            target.copy_(source)

"""Weights in the precision that they are used in."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.kernels.registry import HOOKS

Module = TypeVar("Module", bound=nn.Module)
TENSOR_CORE_MULTIPLE = 8  # sizes of 16-bit matrices that the units for products of a GPU take whole


def planning_dtype(device: torch.device, autocast_dtype: torch.dtype | None) -> torch.dtype | None:
    """float16 where products may have short mantissas: it has those of TF32, and takes half as long. Else none."""
    short = autocast_dtype is not None or torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if short and device.type == "cuda" else None


class PaddedLinear(nn.Module):
    """A copy of a dense layer with zeros up to multiples of a size: 16-bit matrices are multiplied fastest so."""

    def __init__(self, layer: Any, multiple: int) -> None:
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


class PaddedMembers(nn.Module):
    """The same for dense layers side by side, whose weights are [members, inputs, outputs]."""

    def __init__(self, layer: Any, multiple: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, bias = layer.weight.detach(), layer.bias.detach()
        extra = (0, -self.out_features % multiple)
        self.weight = nn.Parameter(F.pad(weight, (*extra, 0, -self.in_features % multiple)))
        self.bias = nn.Parameter(F.pad(bias, extra))

    def forward(
        self, x: Float[Tensor, "chosen rows inputs"], members: Tensor | None = None, *, frozen: bool = False
    ) -> Float[Tensor, "chosen rows outputs"]:
        weight, bias = (self.weight, self.bias) if members is None else (self.weight[members], self.bias[members])
        spare = weight.shape[1] - x.shape[-1]
        x = torch.baddbmm(bias, F.pad(x, (0, spare)) if spare else x, weight)
        return x if x.shape[-1] == self.out_features else x[..., : self.out_features]


PADDED: dict[str, type[PaddedLinear] | type[PaddedMembers]] = {
    "torch.nn.modules.linear.Linear": PaddedLinear,
    "rl_lab.nn.member_mlp.MemberLinear": PaddedMembers,
}


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks or methods of its own, which a padded copy would leave out."""
    replaced = (name for name in module.__dict__ if callable(getattr(type(module), name, None)))
    return any(getattr(module, name) for name in HOOKS) or any(replaced)


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
        """The copy of a module. It runs its plain methods: kernels were chosen for the original's precision."""
        twin = copy.deepcopy(module)
        for part in list(twin.modules()):
            for name, child in part.named_children():
                kind = PADDED.get(f"{type(child).__module__}.{type(child).__qualname__}")
                if kind is not None and not is_changed(child) and not self._fits(child):
                    setattr(part, name, kind(child, self.multiple))
        for part in twin.modules():
            if hasattr(part, "kernels"):
                setattr(part, "kernels", {})  # noqa: B010  # a plain attribute, which torch's stubs do not know
            if not isinstance(part, nn.LayerNorm) and not getattr(part, "full_precision", False):
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

    def _fits(self, layer: Any) -> bool:
        return not any(size % self.multiple for size in layer.weight.shape[-2:])

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the present weights."""
        if len(self._targets) > 0:
            torch._foreach_copy_(self._targets, self._sources)
        for source, target in self._padded:
            target.copy_(source)

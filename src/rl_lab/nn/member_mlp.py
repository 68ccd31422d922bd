"""Several independent networks of one shape, computed together."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class MemberLinear(nn.Module):
    """A linear layer for each member; weights as in PETS: truncated normal of deviation 1 / (2 √inputs)."""

    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.members, self.in_features, self.out_features = members, in_features, out_features
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(members, 1, out_features))
        std = 1.0 / (2.0 * math.sqrt(in_features))
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(
        self,
        x: Float[Tensor, "members rows inputs"],
        members: Int[Tensor, " members"] | None = None,
        *,
        frozen: bool = False,
    ) -> Float[Tensor, "members rows outputs"]:
        """`members`: which of them, where not all. `frozen`: the gradient goes through, but not into the weights."""
        weight, bias = (self.weight.detach(), self.bias.detach()) if frozen else (self.weight, self.bias)
        if members is not None:
            weight, bias = weight[members], bias[members]
        return torch.baddbmm(bias, x, weight)


class MemberMLP(nn.Module):
    """`layers` times linear → SiLU, then linear, for each member."""

    def __init__(self, members: int, in_features: int, out_features: int, *, units: int, layers: int) -> None:
        super().__init__()
        sizes = [in_features, *[units] * layers, out_features]
        self.layers = nn.ModuleList(MemberLinear(members, before, after) for before, after in pairwise(sizes))

    def forward(
        self, x: Float[Tensor, "members rows inputs"], members: Int[Tensor, " members"] | None = None
    ) -> Float[Tensor, "members rows outputs"]:
        *hidden, output = self.layers
        for layer in hidden:
            x = F.silu(layer(x, members))
        return output(x, members)

"""Three forms of the GRU. They differ in where the reset gate stands, in their norm, and in how they begin.

Each takes x [rows, size] and the state h [rows, size] and gives the next h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.kernels.registry import HOOKS
from rl_lab.nn.layers import Linear, init_averaged_, make_norm
from rl_lab.nn.styles import LayerStyle


class RecurrentCell(nn.Module, ABC):
    """One step of the deterministic path."""

    @abstractmethod
    def __init__(self, inputs: int, size: int, style: LayerStyle) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, x: Float[Tensor, "rows inputs"], h: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]: ...


class ResetBeforeGRU(RecurrentCell):
    """PlaNet's: the reset gate is applied to the state before the candidate's product.

    r, u = σ(W[x, h] + b), b = 1 at first;  c = tanh(W_c[x, r·h] + b_c);  h' = u·h + (1 - u)·c.
    """

    def __init__(self, inputs: int, size: int, style: LayerStyle) -> None:
        super().__init__(inputs, size, style)
        self.gates = Linear(inputs + size, 2 * size, init=style.init)
        self.candidate = Linear(inputs + size, size, init=style.init)
        nn.init.ones_(self.gates.bias)

    def forward(self, x: Float[Tensor, "rows inputs"], h: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
        h = h.to(x.dtype)
        reset, keep = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        candidate = torch.tanh(self.candidate(torch.cat([x, reset * h], -1)))
        return torch.lerp(candidate, h, keep)


class ResetAfterGRU(RecurrentCell):
    """Dreamer v1's, which is torch's own: the reset gate multiplies the state's product, bias included.

    r, u = σ(W x + U h + b);  c = tanh(W_c x + b_c + r·(U_c h + d_c));  h' = u·h + (1 - u)·c. U is orthogonal at first.
    """

    def __init__(self, inputs: int, size: int, style: LayerStyle) -> None:
        super().__init__(inputs, size, style)
        self.cell = nn.GRUCell(inputs, size)
        init_averaged_(self.cell.weight_ih, fans=(inputs, 3 * size), uniform=True)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)

    def forward(self, x: Float[Tensor, "rows inputs"], h: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
        h = h.to(x.dtype)
        return self.by_gates(x, h) if x.is_cuda and self.is_torchs_own else self.cell(x, h)

    @property
    def is_torchs_own(self) -> bool:
        """Whether the cell is torch's, without hooks: only then is it what `by_gates` computes."""
        return type(self.cell) is nn.GRUCell and not any(getattr(self.cell, kind) for kind in HOOKS)

    def by_gates(self, x: Float[Tensor, "rows inputs"], h: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
        """The same, gate by gate. Torch's own kernel on a GPU is not fused with what stands beside it, and its backward
        pass sums up the gradients of the biases in every step, wanted or not."""
        own = F.linear(x, self.cell.weight_ih, self.cell.bias_ih).chunk(3, -1)
        past = F.linear(h, self.cell.weight_hh, self.cell.bias_hh).chunk(3, -1)
        reset, keep = torch.sigmoid(own[0] + past[0]), torch.sigmoid(own[1] + past[1])
        return torch.lerp(torch.tanh(own[2] + reset * past[2]), h, keep)


class NormGRU(RecurrentCell):
    """Dreamer v2's and that of v3 in 2023: one product, one LayerNorm over all three gates.

    r, c, u = LayerNorm(W[x, h]);  c = tanh(σ(r)·c);  u = σ(u - 1);  h' = u·c + (1 - u)·h.

    Here u is the share of the new.
    """

    update_bias = -1.0

    def __init__(self, inputs: int, size: int, style: LayerStyle) -> None:
        super().__init__(inputs, size, style)
        self.gates = Linear(inputs + size, 3 * size, init=style.init, bias=style.hidden_bias)
        self.norm = make_norm(LayerStyle(norm="layer"), 3 * size)

    def forward(self, x: Float[Tensor, "rows inputs"], h: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
        h = h.to(x.dtype)
        reset, candidate, update = self.norm(self.gates(torch.cat([x, h], -1))).chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(h, candidate, torch.sigmoid(update + self.update_bias))


CELLS: dict[str, type[RecurrentCell]] = {
    "reset_before": ResetBeforeGRU,
    "reset_after": ResetAfterGRU,
    "layer_norm": NormGRU,
}

"""`MLP.forward` with RMSNorm and SiLU on a GPU: two kernels a layer, the product and the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.kernels.triton.images import rows_norm_silu


def supports_forward(mlp: Any) -> str | None:
    style = mlp.style
    if (style.norm, style.activation, style.hidden_bias) != ("rms", "silu", True) or len(mlp) == 0:
        return "its layers are not Linear → RMSNorm → SiLU with a bias"
    return "an activation was replaced" if any(layer.activate is not F.silu for layer in mlp) else None


def forward(mlp: Any, x: Tensor) -> Tensor:
    """Rows [*lead, inputs] through all layers. The kernel takes four rows at a time: others take the plain layers."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) % 4:
        return torch.nn.Sequential.forward(mlp, x)
    for layer in mlp:
        rows = rows_norm_silu(
            F.linear(rows, layer.linear.weight), layer.linear.bias, layer.norm.weight, eps=layer.norm.eps
        )
    return rows.view(*x.shape[:-1], mlp.output_size)

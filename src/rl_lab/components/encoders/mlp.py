"""The encoder of vectors."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.nn.layers import MLP
from rl_lab.nn.math import symlog
from rl_lab.nn.styles import StyleLike, layer_style


class MLPEncoder(nn.Module):
    """symlog, then `layers` times Linear → norm → activation."""

    def __init__(
        self, *, input_size: int, units: int = 256, layers: int = 3, use_symlog: bool = True, style: StyleLike = None
    ) -> None:
        super().__init__()
        self.use_symlog = use_symlog
        self.mlp = MLP(input_size, units, layers, style=layer_style(style))
        self.output_size = self.mlp.output_size

    def forward(self, vector: Float[Tensor, "*lead input_size"]) -> Float[Tensor, "*lead output_size"]:
        return self.mlp(symlog(vector.float()) if self.use_symlog else vector)

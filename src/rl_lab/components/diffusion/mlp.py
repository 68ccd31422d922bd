"""A denoising network for short sequences of few numbers."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.components.diffusion.networks import Denoiser, LevelEmbedding, require_condition


class DenoisingMLP(Denoiser):
    """[whole noisy sequence, embedded level, condition] → `layers` residual blocks of `units` → the whole sequence."""

    def __init__(
        self,
        *,
        dim: int,
        horizon: int,
        condition: int = 0,
        units: int = 256,
        layers: int = 3,
        level_embedding: int = 64,
    ) -> None:
        super().__init__()
        self.condition_size, self.shape = condition, (horizon, dim)
        self.level = LevelEmbedding(level_embedding)
        self.input = nn.Linear(horizon * dim + level_embedding + condition, units)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(units), nn.Linear(units, units), nn.Mish(), nn.Linear(units, units))
            for _ in range(layers)
        )
        self.output = nn.Sequential(nn.LayerNorm(units), nn.Linear(units, horizon * dim))

    def forward(
        self,
        noisy: Float[Tensor, "batch time dim"],
        level: Shaped[Tensor, " batch"],
        condition: Float[Tensor, "batch condition"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        require_condition(condition, self.condition_size)
        parts = [noisy.flatten(1), self.level(level)]
        x = self.input(torch.cat(parts if condition is None else [*parts, condition], -1))
        for block in self.blocks:
            x = x + block(x)
        return self.output(x).unflatten(-1, self.shape)

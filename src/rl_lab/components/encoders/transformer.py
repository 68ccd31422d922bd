"""A small vision transformer (Dosovitskiy et al., 2021) as image encoder."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rl_lab.components.encoders.images import flatten_lead, scale_image

PATCH, HEADS, LAYERS = 8, 4, 3


class VisionTransformer(nn.Module):
    """The image in patches of 8×8, each a token with a learned place; three blocks of attention and feed-forward with
    the norm before each; then every token on an eighth of its width, side by side.

    The width is 8·depth. Tokens are not averaged: where something is matters to an agent.
    """

    shrinks_by = PATCH

    def __init__(self, *, height: int, width: int, channels: int, depth: int = 16) -> None:
        super().__init__()
        size, tokens = 8 * depth, (height // PATCH) * (width // PATCH)
        self.patches = nn.Conv2d(channels, size, PATCH, stride=PATCH)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, size))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size, HEADS, 4 * size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.narrow = nn.LayerNorm(size), nn.Linear(size, depth)
        self.output_size = tokens * depth

    def forward(self, image: UInt8[Tensor, "*lead height width channels"]) -> Float[Tensor, "*lead output_size"]:
        x = self.patches(scale_image(flatten_lead(image)).permute(0, 3, 1, 2))
        x = x.flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.narrow(self.norm(x)).reshape(*image.shape[:-3], self.output_size)

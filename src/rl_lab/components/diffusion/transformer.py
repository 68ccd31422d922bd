"""The time-series diffusion transformer of Diffusion Policy (Chi et al., 2023)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.components.diffusion.networks import Denoiser, LevelEmbedding, require_condition
from rl_lab.errors import ConfigError

INIT_STD = 0.02


class DiffusionTransformer(Denoiser):
    """The noisy steps are tokens that attend to themselves and to a memory: the level and the condition's parts.

    Attention is causal where `causal`: step t sees the steps up to t, and of `condition_tokens` observations in a row
    those up to t; it always sees the level. With one token the whole condition is seen by every step.
    """

    self_mask: Tensor
    memory_mask: Tensor

    def __init__(
        self,
        *,
        dim: int,
        horizon: int,
        condition: int = 0,
        condition_tokens: int = 1,
        width: int = 256,
        layers: int = 8,
        heads: int = 4,
        attention_dropout: float = 0.01,
        embedding_dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} cannot be shared among heads={heads}: choose a divisor.")
        if condition % condition_tokens:
            raise ConfigError(f"A condition of {condition} numbers is not {condition_tokens} parts of equal size.")
        self.condition_size, self.tokens = condition, condition_tokens if condition else 0
        self.level = LevelEmbedding(width)
        self.input = nn.Linear(dim, width)
        self.observation = nn.Linear(condition // condition_tokens, width) if condition else None
        self.position = nn.Parameter(torch.empty(horizon, width))
        self.memory_position = nn.Parameter(torch.empty(1 + self.tokens, width))
        self.dropout = nn.Dropout(embedding_dropout)
        self.memory = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        layer = nn.TransformerDecoderLayer(
            width, heads, 4 * width, dropout=attention_dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, layers)
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, dim)
        time, token = torch.arange(horizon).unsqueeze(-1), torch.arange(1 + self.tokens).unsqueeze(0)
        hidden = torch.arange(horizon).unsqueeze(0) > time
        unseen = token - 1 > time
        self.register_buffer("self_mask", hidden if causal else torch.zeros_like(hidden), persistent=False)
        self.register_buffer("memory_mask", unseen if causal else torch.zeros_like(unseen), persistent=False)
        self.apply(_initialize)
        for parameter in (self.position, self.memory_position):
            nn.init.normal_(parameter, std=INIT_STD)

    def forward(
        self,
        noisy: Float[Tensor, "batch time dim"],
        level: Shaped[Tensor, " batch"],
        condition: Float[Tensor, "batch condition"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        require_condition(condition, self.condition_size)
        memory = self.level(level).unsqueeze(1)
        if self.observation is not None and condition is not None:
            memory = torch.cat([memory, self.observation(condition.unflatten(-1, (self.tokens, -1)))], 1)
        memory = self.memory(self.dropout(memory + self.memory_position))
        time = noisy.shape[1]
        x = self.dropout(self.input(noisy) + self.position[:time])
        x = self.decoder(x, memory, tgt_mask=self.self_mask[:time, :time], memory_mask=self.memory_mask[:time])
        return self.output(self.norm(x))


def _initialize(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, zero biases."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=INIT_STD)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=INIT_STD)
        nn.init.zeros_(module.in_proj_bias)

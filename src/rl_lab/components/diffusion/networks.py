"""The interface of denoising networks, and the networks by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import log
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from rl_lab.errors import ConfigError, nearest


class Denoiser(nn.Module, ABC):
    """Predicts the noise, the clean sequence or v from a noisy sequence, its level and, if wanted, a condition."""

    @abstractmethod
    def forward(
        self,
        noisy: Float[Tensor, "batch time dim"],
        level: Shaped[Tensor, " batch"],
        condition: Float[Tensor, "batch condition"] | None = None,
    ) -> Float[Tensor, "batch time dim"]: ...


class LevelEmbedding(nn.Module):
    """[sin(k·f), cos(k·f)] with frequencies f from 1 down to 1/10000 in equal ratios."""

    frequencies: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 4 or size % 2:
            raise ConfigError(f"level_embedding={size}: expected an even number of at least 4.")
        half = size // 2
        frequencies = torch.exp(torch.arange(half) * (-log(10_000.0) / (half - 1)))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, level: Shaped[Tensor, " batch"]) -> Float[Tensor, "batch size"]:
        angles = level.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)


def require_condition(condition: Tensor | None, size: int) -> None:
    """Refuse a condition where the network takes none, and the lack of one where it does."""
    given = 0 if condition is None else condition.shape[-1]
    if given != size:
        raise ConfigError(f"The denoising network was built for a condition of {size} numbers and got {given}.")


def make_denoiser(
    name: str, *, dim: int, horizon: int, condition: int, condition_tokens: int = 1, **settings: Any
) -> Denoiser:
    """`unet`, `transformer` or `mlp` for sequences [horizon, dim] with a flat condition of that many numbers.

    `condition_tokens`: the condition is that many equal parts (observations in a row); only the transformer, for which
    each of them is a token, needs to know.
    """
    from rl_lab.components.diffusion.mlp import DenoisingMLP
    from rl_lab.components.diffusion.transformer import DiffusionTransformer
    from rl_lab.components.diffusion.unet import TemporalUNet

    makers: Mapping[str, Any] = {"unet": TemporalUNet, "transformer": DiffusionTransformer, "mlp": DenoisingMLP}
    if name not in makers:
        raise ConfigError(f"network='{name}' does not exist.{nearest(name, makers)}")
    sizes: dict[str, int] = {"dim": dim, "horizon": horizon, "condition": condition}
    if name == "transformer":
        sizes["condition_tokens"] = condition_tokens
    network: Denoiser = makers[name](**sizes, **settings)
    return network


def level_tensor(level: int, batch: int, device: torch.device) -> Int[Tensor, " batch"]:
    """The same level for every sequence of a batch."""
    return torch.full((batch,), level, dtype=torch.int64, device=device)

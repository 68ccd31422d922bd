"""The temporal U-Net of Diffusion Policy (Chi et al., 2023) and, without scales, of Diffuser (Janner et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from rl_lab.components.diffusion.networks import Denoiser, LevelEmbedding, require_condition
from rl_lab.errors import ConfigError


class ConvBlock(nn.Module):
    """Convolution over time → group norm → Mish."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)
        self.norm = nn.GroupNorm(groups, outputs)

    def forward(self, x: Float[Tensor, "batch inputs time"]) -> Float[Tensor, "batch outputs time"]:
        return F.mish(self.norm(self.conv(x)))


class ConditionalResidualBlock(nn.Module):
    """Two convolution blocks with a skip; between them the condition scales and shifts each channel (FiLM).

    The scale is the network's output itself, not 1 plus it. Without `scale` the condition is only added.
    """

    def __init__(
        self, inputs: int, outputs: int, condition: int, *, kernel: int, groups: int, scale: bool = True
    ) -> None:
        super().__init__()
        self.first = ConvBlock(inputs, outputs, kernel=kernel, groups=groups)
        self.second = ConvBlock(outputs, outputs, kernel=kernel, groups=groups)
        self.film = nn.Linear(condition, 2 * outputs if scale else outputs)
        self.scale = scale
        self.skip: nn.Module = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(
        self, x: Float[Tensor, "batch inputs time"], condition: Float[Tensor, "batch condition"]
    ) -> Float[Tensor, "batch outputs time"]:
        hidden, film = self.first(x), self.film(condition).unsqueeze(-1)
        if self.scale:
            scale, shift = film.chunk(2, 1)
            hidden = scale * hidden + shift
        else:
            hidden = hidden + film
        return self.second(hidden) + self.skip(x)


class TemporalUNet(Denoiser):
    """Convolutions over time at len(`widths`) resolutions; the level and the condition enter every block.

    Time is halved between resolutions, so `horizon` must be a multiple of 2^(len(widths) - 1). The skip at full
    resolution is not used, as in the published network. The blocks see Mish of the joint feature
    [MLP(embedded level), condition].
    """

    def __init__(
        self,
        *,
        dim: int,
        horizon: int,
        condition: int = 0,
        widths: Sequence[int] = (256, 512, 1024),
        level_embedding: int = 256,
        kernel: int = 5,
        groups: int = 8,
        scale: bool = True,  # FiLM scales and shifts; False: shifts only
    ) -> None:
        super().__init__()
        halvings = len(widths) - 1
        if horizon % 2**halvings:
            raise ConfigError(
                f"horizon={horizon}: a U-Net of {len(widths)} widths halves the time {halvings} times and needs a "
                f"multiple of {2**halvings}. Choose such a horizon, or fewer widths."
            )
        for width in widths:
            if width % groups:
                raise ConfigError(f"widths={list(widths)}: expected multiples of {groups}, the groups of the norm.")
        self.condition_size = condition
        self.level = nn.Sequential(
            LevelEmbedding(level_embedding),
            nn.Linear(level_embedding, 4 * level_embedding),
            nn.Mish(),
            nn.Linear(4 * level_embedding, level_embedding),
        )
        joint = level_embedding + condition

        def block(inputs: int, outputs: int) -> ConditionalResidualBlock:
            return ConditionalResidualBlock(inputs, outputs, joint, kernel=kernel, groups=groups, scale=scale)

        pairs = list(zip([dim, *widths[:-1]], widths, strict=True))
        self.down = nn.ModuleList(nn.ModuleList([block(i, o), block(o, o)]) for i, o in pairs)
        self.shrink = nn.ModuleList(nn.Conv1d(o, o, 3, stride=2, padding=1) for o in widths[:-1])
        self.middle = nn.ModuleList([block(widths[-1], widths[-1]), block(widths[-1], widths[-1])])
        self.up = nn.ModuleList(nn.ModuleList([block(2 * o, i), block(i, i)]) for i, o in reversed(pairs[1:]))
        self.grow = nn.ModuleList(nn.ConvTranspose1d(i, i, 4, stride=2, padding=1) for i, _ in reversed(pairs[1:]))
        self.final = nn.Sequential(
            ConvBlock(widths[0], widths[0], kernel=kernel, groups=groups), nn.Conv1d(widths[0], dim, 1)
        )

    def forward(
        self,
        noisy: Float[Tensor, "batch time dim"],
        level: Shaped[Tensor, " batch"],
        condition: Float[Tensor, "batch condition"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        require_condition(condition, self.condition_size)
        feature = self.level(level)
        feature = F.mish(feature if condition is None else torch.cat([feature, condition], -1))
        x, skips = noisy.transpose(1, 2), []
        for depth, blocks in enumerate(self.down):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, feature)
            skips.append(x)
            if depth < len(self.shrink):
                x = self.shrink[depth](x)
        for block in self.middle:
            x = block(x, feature)
        for blocks, grow in zip(self.up, self.grow, strict=True):
            x = torch.cat([x, skips.pop()], 1)
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, feature)
            x = grow(x)
        return self.final(x).transpose(1, 2)

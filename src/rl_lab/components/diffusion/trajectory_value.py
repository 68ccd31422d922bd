"""The value of a noisy trajectory (Janner et al., 2022), which guides a sampler and chooses among its draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from rl_lab.components.diffusion.guidance import Inpainting
from rl_lab.components.diffusion.networks import LevelEmbedding, level_tensor
from rl_lab.components.diffusion.schedule import NoiseSchedule
from rl_lab.components.diffusion.unet import ConditionalResidualBlock
from rl_lab.errors import ConfigError
from rl_lab.nn.normalizers import RunningMeanStd


class TrajectoryValue(nn.Module):
    """J(x_k, k): the expected return, in deviations of the data's returns, of the clean trajectory that x_k came from.

    Half a temporal U-Net: for each width two residual blocks and a halving of the time, two narrower blocks with
    halvings, and an MLP on what is left together with the embedded level.
    """

    def __init__(
        self,
        *,
        dim: int,
        horizon: int,
        widths: Sequence[int],
        level_embedding: int,
        kernel: int = 5,
        groups: int = 8,
    ) -> None:
        super().__init__()
        if any(width % groups for width in widths) or widths[-1] % (4 * groups):
            raise ConfigError(
                f"widths={list(widths)}: expected multiples of {groups}, the groups of the norm, and a last width that "
                f"can be divided by {4 * groups}: two blocks of half and a quarter of it follow."
            )
        self.level = nn.Sequential(
            LevelEmbedding(level_embedding),
            nn.Linear(level_embedding, 4 * level_embedding),
            nn.Mish(),
            nn.Linear(4 * level_embedding, level_embedding),
        )

        def block(inputs: int, outputs: int) -> ConditionalResidualBlock:
            return ConditionalResidualBlock(
                inputs, outputs, level_embedding, kernel=kernel, groups=groups, scale=False
            )  # fmt: skip

        stages, inputs, time = [], dim, horizon
        for width in widths:
            stages.append(nn.ModuleList([block(inputs, width), block(width, width)]))
            inputs = width
        for width in (widths[-1] // 2, widths[-1] // 4):
            stages.append(nn.ModuleList([block(inputs, width)]))
            inputs = width
        for _ in stages:
            time = (time + 1) // 2
        self.stages = nn.ModuleList(stages)
        outputs = [*widths, widths[-1] // 2, widths[-1] // 4]
        self.shrink = nn.ModuleList(nn.Conv1d(width, width, 3, stride=2, padding=1) for width in outputs)
        flat = inputs * time
        hidden = (flat + level_embedding) // 2
        self.head = nn.Sequential(nn.Linear(flat + level_embedding, hidden), nn.Mish(), nn.Linear(hidden, 1))
        self.returns = RunningMeanStd()

    def forward(
        self, noisy: Float[Tensor, "batch time dim"], level: Shaped[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        feature = self.level(level)
        mish, x = nn.functional.mish(feature), noisy.transpose(1, 2)
        for stage, shrink in zip(self.stages, self.shrink, strict=True):
            for block in stage:  # type: ignore[attr-defined]
                x = block(x, mish)
            x = shrink(x)
        return self.head(torch.cat([x.flatten(1), feature], -1)).squeeze(-1)

    def loss(
        self, schedule: NoiseSchedule, clean: Inpainting, rows: Float[Tensor, "batch time dim"],
        returns: Float[Tensor, " batch"], level: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, ""]:  # fmt: skip
        """The squared error on noisy trajectories, with the return of the clean one as the target; what is known of a
        plan stays clean, as the sampler has it."""
        self.returns.update(returns)
        level = schedule.random_levels(len(rows)) if level is None else level
        noisy = clean.constrain(schedule.add_noise(rows, torch.randn_like(rows), level), 0)
        return (self(noisy, level) - self.returns(returns)).square().mean()

    def expected_return(self, rows: Float[Tensor, "batch time dim"]) -> Float[Tensor, " batch"]:
        """The predicted return of each noise-free trajectory, scaled back from normalised units."""
        value = self(rows, level_tensor(0, len(rows), rows.device))
        return value * (self.returns.variance + self.returns.eps).sqrt() + self.returns.mean


class ValueGuidance(Inpainting):
    """Before each step, `steps` ascents x ← x + scale·Σ·∇J(x, k) with Σ the variance of the step; none in the last
    `stop` levels. What is known is put back after each."""

    def __init__(
        self, inpainting: Inpainting, value: TrajectoryValue, schedule: NoiseSchedule, *, scale: float, steps: int,
        stop: int,
    ) -> None:  # fmt: skip
        super().__init__(inpainting.values, inpainting.known)
        self.value, self.schedule = value, schedule
        self.scale, self.steps, self.stop = scale, steps, stop

    def before(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        if self.scale == 0.0 or level < self.stop:
            return x
        levels = level_tensor(level, len(x), x.device)
        variance = self.schedule.ddpm_posterior(x, x, level, level - 1).std ** 2
        for _ in range(self.steps):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.value(at, levels).sum(), at)
            x = self.constrain(x + self.scale * variance * gradient, level)
        return x

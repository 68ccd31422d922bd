"""A diffusion model of sequences: its loss, and drawing from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_lab.components.diffusion.guidance import Guidance, ReverseStep
from rl_lab.components.diffusion.networks import Denoiser, level_tensor
from rl_lab.components.diffusion.schedule import CLEAN, NoiseSchedule, Prediction, Spacing
from rl_lab.errors import ConfigError, nearest

Sampler = Literal["ddpm", "ddim"]
PREDICTIONS = ("epsilon", "x0", "v")
SAMPLERS = ("ddpm", "ddim")


class DiffusionModel(nn.Module):
    """p(x | condition) over sequences [time, dim], by learning to take noise away.

    With `clip` the predicted clean sample stays within ±clip in every step, which needs data of that range.
    """

    def __init__(
        self,
        *,
        network: Denoiser,
        schedule: NoiseSchedule,
        prediction: str = "epsilon",  # epsilon | x0 | v
        clip: float | None = 1.0,
    ) -> None:
        super().__init__()
        if prediction not in PREDICTIONS:
            raise ConfigError(f"prediction='{prediction}' does not exist.{nearest(prediction, PREDICTIONS)}")
        self.network, self.schedule, self.clip = network, schedule, clip
        self.prediction: Prediction = prediction  # type: ignore[assignment]

    # Learning ---------------------------------------------------------------------------------------------------------

    def loss(
        self,
        x0: Float[Tensor, "batch time dim"],
        condition: Float[Tensor, "batch condition"] | None = None,
        *,
        weight: Float[Tensor, "*shape"] | None = None,
        known: Bool[Tensor, "time dim"] | None = None,
        level: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, ""]:
        """E |target - network(x_k, k, condition)|², k uniform, ε standard normal.

        `weight` (of any shape that broadcasts to x0) multiplies the squared errors. `known` entries stay clean in x_k,
        as inpainting will have them, and do not count. `level` fixes the levels, for tests and diagnostics.
        """
        level = self.schedule.random_levels(len(x0)) if level is None else level
        epsilon = torch.randn_like(x0)
        noisy = self.schedule.add_noise(x0, epsilon, level)
        if known is not None:
            noisy = torch.where(known, x0, noisy)
        target = self.schedule.target(self.prediction, x0, epsilon, level)
        error = (self.network(noisy, level, condition) - target).square()
        if known is not None:
            error = error.masked_fill(known, 0.0)
        return (error if weight is None else weight * error).mean()

    # Drawing ----------------------------------------------------------------------------------------------------------

    def predict_clean(
        self,
        x: Float[Tensor, "batch time dim"],
        level: int,
        condition: Float[Tensor, "batch condition"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """x_0 as the network sees it in x; differentiable in x."""
        levels = level_tensor(level, len(x), x.device)
        clean = self.schedule.predicted_x0(self.prediction, self.network(x, levels, condition), x, levels)
        return clean if self.clip is None else clean.clamp(-self.clip, self.clip)

    @torch.no_grad()
    def sample(
        self,
        shape: Sequence[int],
        condition: Float[Tensor, "batch condition"] | None = None,
        *,
        sampler: Sampler = "ddpm",
        steps: int | None = None,
        spacing: Spacing = "leading",
        guidance: Guidance | None = None,
        temperature: float = 1.0,
        eta: float = 0.0,
    ) -> Float[Tensor, "batch time dim"]:
        """Draw sequences of `shape` = [batch, time, dim]. `steps`: of the reverse process; None: one for each level.

        `temperature` scales the first noise and that of every step. `eta` belongs to DDIM: 0 adds no noise.
        """
        x = temperature * torch.randn(*shape, device=self.schedule.betas.device)
        levels = self.schedule.sampling_levels(steps, spacing)
        return self.denoise(
            x, levels, condition, sampler=sampler, guidance=guidance, temperature=temperature, eta=eta
        )  # fmt: skip

    @torch.no_grad()
    def denoise(
        self,
        x: Float[Tensor, "batch time dim"],
        levels: Sequence[int],
        condition: Float[Tensor, "batch condition"] | None = None,
        *,
        sampler: Sampler = "ddpm",
        guidance: Guidance | None = None,
        temperature: float = 1.0,
        eta: float = 0.0,
    ) -> Float[Tensor, "batch time dim"]:
        """Take the noise out of x, which is at `levels[0]`, by way of the other levels (falling, without -1)."""
        if sampler not in SAMPLERS:
            raise ConfigError(f"sampler='{sampler}' does not exist.{nearest(sampler, SAMPLERS)}")
        hooks = Guidance() if guidance is None else guidance
        x = hooks.constrain(x, levels[0])
        for level, next_level in zip(levels, [*levels[1:], CLEAN], strict=True):
            x = hooks.constrain(hooks.before(x, level), level)
            step = self._reverse_step(x, level, next_level, condition, sampler, eta)
            x = hooks.mean(step)
            if step.std > 0.0:
                x = x + temperature * step.std * torch.randn_like(x)
            x = hooks.constrain(x, next_level)
        return x

    def _reverse_step(
        self, x: Tensor, level: int, next_level: int, condition: Tensor | None, sampler: Sampler, eta: float
    ) -> ReverseStep:
        clean = self.predict_clean(x, level, condition)
        if sampler == "ddpm":
            mean, std = self.schedule.ddpm_posterior(clean, x, level, next_level)
        else:
            epsilon = self.schedule.implied_epsilon(clean, x, level_tensor(level, len(x), x.device))
            mean, std = self.schedule.ddim_posterior(clean, epsilon, level, next_level, eta)
        return ReverseStep(level, next_level, x, clean, mean, std)

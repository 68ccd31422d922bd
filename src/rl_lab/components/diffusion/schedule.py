"""Noise schedules: how much noise each level holds, and the formulas that follow from it alone."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.errors import ConfigError, nearest

Prediction = Literal["epsilon", "x0", "v"]
Spacing = Literal["leading", "trailing"]
CLEAN = -1  # the level below 0: no noise at all
MAX_BETA = 0.999
MIN_VARIANCE = 1e-20


def squared_cosine_betas(levels: int) -> Float[Tensor, " levels"]:
    """ᾱ(u) = cos²((u + 0.008)/1.008 · π/2) at u = k/K, and β_k = 1 - ᾱ((k+1)/K)/ᾱ(k/K), at most 0.999."""

    def signal(u: float) -> float:
        return cos((u + 0.008) / 1.008 * pi / 2.0) ** 2

    betas = [min(1.0 - signal((k + 1) / levels) / signal(k / levels), MAX_BETA) for k in range(levels)]
    return torch.tensor(betas, dtype=torch.float64)


def linear_betas(levels: int, start: float, end: float) -> Float[Tensor, " levels"]:
    """β from `start` to `end` in equal steps."""
    return torch.linspace(start, end, levels, dtype=torch.float64)


class Posterior(NamedTuple):
    """q(x_prev | x_k, x_0): a normal with this mean and, for every entry, this standard deviation."""

    mean: Float[Tensor, "*shape"]
    std: float


class NoiseSchedule(nn.Module):
    """K levels of noise: x_k = √ᾱ_k·x_0 + √(1-ᾱ_k)·ε, with ᾱ_k = Π_{i≤k} (1-β_i) and k from 0 to K - 1.

    `levels` of a batch are tensors [batch]; the level of a sampler's step is one number, and `CLEAN` means x_0.
    """

    betas: Tensor
    signal: Tensor  # √ᾱ_k
    noise: Tensor  # √(1-ᾱ_k)

    def __init__(
        self,
        *,
        levels: int = 100,
        kind: str = "squared_cosine",  # squared_cosine | linear
        beta_start: float = 1e-4,  # of the linear schedule
        beta_end: float = 0.02,
    ) -> None:
        super().__init__()
        if levels < 1:
            raise ConfigError(f"schedule.levels={levels}: expected at least 1 level of noise.")
        if kind not in ("squared_cosine", "linear"):
            raise ConfigError(f"schedule.kind='{kind}' does not exist.{nearest(kind, ['squared_cosine', 'linear'])}")
        if not 0.0 < beta_start <= beta_end < 1.0:
            raise ConfigError(f"beta_start={beta_start}, beta_end={beta_end}: expected 0 < beta_start <= beta_end < 1.")
        betas = squared_cosine_betas(levels) if kind == "squared_cosine" else linear_betas(levels, beta_start, beta_end)
        alpha_bar = torch.cumprod(1.0 - betas, 0)
        self._alpha_bar = [*alpha_bar.tolist(), 1.0]  # the last entry is that of CLEAN
        self.register_buffer("betas", betas.float(), persistent=False)
        self.register_buffer("signal", alpha_bar.sqrt().float(), persistent=False)
        self.register_buffer("noise", (1.0 - alpha_bar).sqrt().float(), persistent=False)

    @property
    def levels(self) -> int:
        return len(self.betas)

    def alpha_bar(self, level: int) -> float:
        """The share of the clean signal's variance that is left at a level; 1 at `CLEAN`."""
        return self._alpha_bar[level]

    def random_levels(self, batch: int) -> Int[Tensor, " batch"]:
        """Levels drawn uniformly, for training."""
        return torch.randint(self.levels, (batch,), device=self.betas.device)

    # Training ---------------------------------------------------------------------------------------------------------

    def add_noise(
        self, x0: Float[Tensor, "*shape"], epsilon: Float[Tensor, "*shape"], level: Int[Tensor, " batch"]
    ) -> Float[Tensor, "*shape"]:
        """x_k = √ᾱ_k·x_0 + √(1-ᾱ_k)·ε."""
        return self._at(self.signal, level, x0) * x0 + self._at(self.noise, level, x0) * epsilon

    def target(
        self,
        kind: Prediction,
        x0: Float[Tensor, "*shape"],
        epsilon: Float[Tensor, "*shape"],
        level: Int[Tensor, " batch"],
    ) -> Float[Tensor, "*shape"]:
        """The target that the network is trained to predict at each level: ε, x_0, or v = √ᾱ_k·ε - √(1-ᾱ_k)·x_0."""
        if kind == "epsilon":
            return epsilon
        if kind == "x0":
            return x0
        return self._at(self.signal, level, x0) * epsilon - self._at(self.noise, level, x0) * x0

    # Conversions ------------------------------------------------------------------------------------------------------

    def predicted_x0(
        self,
        kind: Prediction,
        prediction: Float[Tensor, "*shape"],
        x: Float[Tensor, "*shape"],
        level: Int[Tensor, " batch"],
    ) -> Float[Tensor, "*shape"]:
        """The clean sample that a prediction of any kind implies for x at this level."""
        signal, noise = self._at(self.signal, level, x), self._at(self.noise, level, x)
        if kind == "epsilon":
            return (x - noise * prediction) / signal
        if kind == "x0":
            return prediction
        return signal * x - noise * prediction

    def implied_epsilon(
        self, x0: Float[Tensor, "*shape"], x: Float[Tensor, "*shape"], level: Int[Tensor, " batch"]
    ) -> Float[Tensor, "*shape"]:
        """The noise that is in x if the clean sample is x_0."""
        return (x - self._at(self.signal, level, x) * x0) / self._at(self.noise, level, x)

    # Sampling ---------------------------------------------------------------------------------------------------------

    def sampling_levels(self, steps: int | None = None, spacing: Spacing = "leading") -> list[int]:
        """The levels that a sampler with so many steps visits, from noisy to clean; without `steps`, all of them.

        `leading` takes the multiples of K // steps, as the first DDIM code did: with few steps it begins below the
        highest level. `trailing` begins there and ends K / steps levels above the clean sample.
        """
        steps = self.levels if steps is None else steps
        if not 1 <= steps <= self.levels:
            raise ConfigError(f"sampling_steps={steps}: expected from 1 to {self.levels}, the schedule's levels.")
        if spacing == "leading":
            return [i * (self.levels // steps) for i in reversed(range(steps))]
        return [round(self.levels * (i + 1) / steps) - 1 for i in reversed(range(steps))]

    def ddpm_posterior(
        self, x0: Float[Tensor, "*shape"], x: Float[Tensor, "*shape"], level: int, next_level: int
    ) -> Posterior:
        """q(x_next | x, x_0). Where levels are left out, α is the product of those in between."""
        now, after = self.alpha_bar(level), self.alpha_bar(next_level)
        alpha = now / after
        to_x0 = sqrt(after) * (1.0 - alpha) / (1.0 - now)
        to_x = sqrt(alpha) * (1.0 - after) / (1.0 - now)
        variance = (1.0 - after) / (1.0 - now) * (1.0 - alpha)
        std = 0.0 if next_level == CLEAN else sqrt(max(variance, MIN_VARIANCE))
        return Posterior(to_x0 * x0 + to_x * x, std)

    def ddim_posterior(
        self,
        x0: Float[Tensor, "*shape"],
        epsilon: Float[Tensor, "*shape"],
        level: int,
        next_level: int,
        eta: float = 0.0,
    ) -> Posterior:
        """√ᾱ_next·x_0 + √(1 - ᾱ_next - σ²)·ε with σ = η times the deviation of DDPM; η = 0 is deterministic."""
        now, after = self.alpha_bar(level), self.alpha_bar(next_level)
        std = eta * sqrt((1.0 - after) / (1.0 - now) * (1.0 - now / after))
        return Posterior(sqrt(after) * x0 + sqrt(max(1.0 - after - std**2, 0.0)) * epsilon, std)

    @staticmethod
    def _at(table: Tensor, level: Tensor, x: Tensor) -> Tensor:
        return table[level].view(-1, *[1] * (x.ndim - 1)).to(x.dtype)

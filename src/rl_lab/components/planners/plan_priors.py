"""Priors over action sequences as diffusion processes: what the diffusion planner steers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import cos, pi, sqrt
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.diffusion.model import DiffusionModel
from rl_lab.components.diffusion.schedule import CLEAN
from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.nn.normalizers import LimitsNormalizer


class PlanPrior(ABC):
    """p0(τ | s0), drawn by a reverse process: standard normal noise x_K, then `steps` steps down to the clean x_0.

    Step `index` counts from 0, the noisiest. Rows are environments × candidates, those of an environment together.
    """

    steps: int
    shape: tuple[int, int]  # [time, dim] of x

    @abstractmethod
    def alpha_bar(self, index: int) -> float:
        """The clean signal's share of the variance of x before step `index`; 1 after the last step."""

    def expected_spread(self, index: int) -> float:
        """Deviation of the expected clean sequences before step `index`, in deviations of the clean ones."""
        return 1.0

    @abstractmethod
    def clean(self, x: Float[Tensor, "row time dim"], index: int) -> Float[Tensor, "row time dim"]:
        """x̂_0: the expected clean sequence of x before step `index`; differentiable in x."""

    @abstractmethod
    def kernel(
        self, x: Float[Tensor, "row time dim"], clean: Float[Tensor, "row time dim"], index: int
    ) -> tuple[Float[Tensor, "row time dim"], float]:
        """Mean and deviation of x after step `index`."""

    @abstractmethod
    def actions(self, x: Float[Tensor, "env candidate time dim"]) -> Float[Tensor, "env candidate horizon action"]:
        """Clean sequences as encoded, valid actions."""


class GaussianPrior(PlanPrior):
    """Actions around a mean with a deviation, white or coloured along time; nothing is learned.

    x_0 is standard normal noise from which `ActionLayout.sample` makes actions: mean + std·x_0 within the box, and
    classes by their probabilities. So every reverse step is known exactly: with signal √ᾱ, x̂_0 = √ᾱ·x, and x_{k-1} is
    normal with mean √α·x_k and variance 1 - α, where α = ᾱ_k / ᾱ_{k-1}. √(1 - ᾱ) rises as a sine from 0 to 1.
    """

    def __init__(
        self,
        layout: ActionLayout,
        mean: Float[Tensor, "env horizon action"],
        std: float,
        *,
        steps: int,
        noise_filter: Tensor | None = None,
    ) -> None:
        self.layout, self.mean, self.std, self.steps, self.filter = layout, mean, std, steps, noise_filter
        self.shape = (mean.shape[1], mean.shape[2])

    def alpha_bar(self, index: int) -> float:
        return 0.0 if index == 0 else cos(0.5 * pi * (1.0 - index / self.steps)) ** 2

    def expected_spread(self, index: int) -> float:
        return sqrt(self.alpha_bar(index))

    def clean(self, x: Float[Tensor, "row time dim"], index: int) -> Float[Tensor, "row time dim"]:
        return sqrt(self.alpha_bar(index)) * x

    def kernel(
        self, x: Float[Tensor, "row time dim"], clean: Float[Tensor, "row time dim"], index: int
    ) -> tuple[Float[Tensor, "row time dim"], float]:
        alpha = self.alpha_bar(index) / self.alpha_bar(index + 1)
        return sqrt(alpha) * x, sqrt(1.0 - alpha)

    def actions(self, x: Float[Tensor, "env candidate time dim"]) -> Float[Tensor, "env candidate horizon action"]:
        noise = x if self.filter is None else self.filter @ x
        mean = self.mean[:, None].expand_as(noise)
        return self.layout.sample(mean, torch.full_like(mean, self.std), noise)


class LearnedPrior(PlanPrior):
    """A diffusion model of encoded action sequences, given a condition for each row.

    The reverse process is that of DDPM through `steps` of the model's levels, from the noisiest on. One-hots of
    discrete actions lie at ±1, as continuous entries do, so that one range is clipped for both.
    """

    def __init__(
        self,
        layout: ActionLayout,
        model: DiffusionModel,
        condition: Float[Tensor, "row condition"],
        *,
        horizon: int,
        steps: int,
        limits: LimitsNormalizer | None = None,  # of the actions, where the model's are normalised
    ) -> None:
        self.layout, self.model, self.condition, self.steps = layout, model, condition, steps
        self.limits = limits
        self.shape = (horizon, layout.size)
        self.levels = [*model.schedule.sampling_levels(steps, "trailing"), CLEAN]

    def alpha_bar(self, index: int) -> float:
        return self.model.schedule.alpha_bar(self.levels[index])

    def clean(self, x: Float[Tensor, "row time dim"], index: int) -> Float[Tensor, "row time dim"]:
        return self.model.predict_clean(x, self.levels[index], self.condition)

    def kernel(
        self, x: Float[Tensor, "row time dim"], clean: Float[Tensor, "row time dim"], index: int
    ) -> tuple[Float[Tensor, "row time dim"], float]:
        return self.model.schedule.ddpm_posterior(clean, x, self.levels[index], self.levels[index + 1])

    def actions(self, x: Float[Tensor, "env candidate time dim"]) -> Float[Tensor, "env candidate horizon action"]:
        return self.layout.valid(x if self.limits is None else self.limits.inverse(x))


@runtime_checkable
class ActionPrior(Protocol):
    """A controller that knows what is plausible after an observation: what the diffusion planner takes as its prior."""

    @property
    def horizon(self) -> int:
        """Actions in a sequence."""

    def given(self, observation: Mapping[str, Tensor], *, candidates: int, steps: int) -> PlanPrior:
        """The prior after these observations [env, ...]; its rows are environments × candidates."""

"""Dynamics models by what they say of the change: a point, a normal distribution, or a distribution over bins."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from rl_lab.components.dynamics.base import Dynamics
from rl_lab.errors import ConfigError


class DeterministicDynamics(Dynamics):
    """One value for each entry; squared error."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(outputs=1, **arguments)

    def change(
        self, raw: Float[Tensor, "some rows outputs"], *, sample: bool
    ) -> Float[Tensor, "some rows observation"]:
        return raw

    def negative_log_likelihood(
        self, raw: Float[Tensor, "members rows outputs"], change: Float[Tensor, "members rows observation"]
    ) -> Float[Tensor, "members rows"]:
        return (raw - change).square().mean(-1)


class GaussianDynamics(Dynamics):
    """A mean and a variance for each entry (PETS). The logarithm of the variance stays softly within learned bounds."""

    def __init__(
        self,
        *,
        max_log_variance: float = 0.5,  # where the bounds begin
        min_log_variance: float = -10.0,
        bound_scale: float = 0.01,  # of the loss that draws the bounds together
        **arguments: Any,
    ) -> None:
        super().__init__(outputs=2, **arguments)
        if min_log_variance >= max_log_variance:
            raise ConfigError(
                f"min_log_variance={min_log_variance}, max_log_variance={max_log_variance}: expected the first to be "
                "the lower one."
            )
        self.bound_scale = bound_scale
        self.max_log_variance = nn.Parameter(torch.full((self.observation_size,), float(max_log_variance)))
        self.min_log_variance = nn.Parameter(torch.full((self.observation_size,), float(min_log_variance)))

    def moments(self, raw: Float[Tensor, "some rows outputs"]) -> tuple[Tensor, Tensor]:
        """Mean and log-variance."""
        mean, log_variance = raw.chunk(2, -1)
        log_variance = self.max_log_variance - F.softplus(self.max_log_variance - log_variance)
        return mean, self.min_log_variance + F.softplus(log_variance - self.min_log_variance)

    def change(
        self, raw: Float[Tensor, "some rows outputs"], *, sample: bool
    ) -> Float[Tensor, "some rows observation"]:
        if not sample:
            return raw.chunk(2, -1)[0]
        mean, log_variance = self.moments(raw)
        return mean + (0.5 * log_variance).exp() * torch.randn_like(mean)

    def negative_log_likelihood(
        self, raw: Float[Tensor, "members rows outputs"], change: Float[Tensor, "members rows observation"]
    ) -> Float[Tensor, "members rows"]:
        mean, log_variance = self.moments(raw)
        return ((mean - change).square() * (-log_variance).exp() + log_variance).mean(-1)

    def regularizer(self) -> Tensor:
        return self.bound_scale * (self.max_log_variance - self.min_log_variance).sum()


class CategoricalDynamics(Dynamics):
    """Each entry's change falls into one of `bins` between ±`limit` deviations: any shape, several modes too.

    A change between two centres counts for both, by its distance to them.
    """

    centers: Tensor

    def __init__(self, *, bins: int = 41, limit: float = 5.0, **arguments: Any) -> None:
        if bins < 2 or limit <= 0.0:
            raise ConfigError(f"bins={bins}, limit={limit}: expected at least 2 bins and a limit above 0.")
        super().__init__(outputs=bins, **arguments)
        self.bins, self.limit = bins, limit
        self.register_buffer("centers", torch.linspace(-limit, limit, bins), persistent=False)

    def change(
        self, raw: Float[Tensor, "some rows outputs"], *, sample: bool
    ) -> Float[Tensor, "some rows observation"]:
        logits = raw.unflatten(-1, (self.observation_size, self.bins))
        if not sample:
            return (logits.softmax(-1) * self.centers).sum(-1)
        gumbel = -torch.empty_like(logits).exponential_().log()
        return self.centers[(logits + gumbel).argmax(-1)]

    def negative_log_likelihood(
        self, raw: Float[Tensor, "members rows outputs"], change: Float[Tensor, "members rows observation"]
    ) -> Float[Tensor, "members rows"]:
        log_probs = raw.unflatten(-1, (self.observation_size, self.bins)).log_softmax(-1)
        place = (change.clamp(-self.limit, self.limit) + self.limit) * ((self.bins - 1) / (2 * self.limit))
        below = place.floor().clamp(max=self.bins - 2)
        share = place - below
        index = below.long().unsqueeze(-1)
        low, high = log_probs.gather(-1, index).squeeze(-1), log_probs.gather(-1, index + 1).squeeze(-1)
        return -((1.0 - share) * low + share * high).mean(-1)

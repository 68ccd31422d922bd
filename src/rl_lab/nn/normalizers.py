"""Running scales of values and observations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab import ranks
from rl_lab.nn.distributions import quantile_of_sorted


class RunningScale(nn.Module):
    """TD-MPC2's scale of values: the spread between two percentiles of a batch, at least 1, averaged from 1 on."""

    value: Tensor

    def __init__(self, *, rate: float, low_quantile: float, high_quantile: float) -> None:
        super().__init__()
        self.rate, self.low_quantile, self.high_quantile = rate, low_quantile, high_quantile
        self.register_buffer("value", torch.ones(()))

    @torch.no_grad()
    def update(self, values: Float[Tensor, "*shape"]) -> None:
        """Take these in, unless one of them is not finite."""
        ordered = ranks.gathered(values.detach().flatten()).to(self.value.dtype).sort().values
        rate = torch.isfinite(ordered[0] - ordered[-1]).to(ordered.dtype) * self.rate
        low, high = (quantile_of_sorted(ordered, q) for q in (self.low_quantile, self.high_quantile))
        self.value.lerp_(torch.nan_to_num(high - low, 1.0, 1.0).clamp(min=1.0), rate)

    def forward(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return values / self.value


class RunningMeanStd(nn.Module):
    """Mean and variance of everything seen, per entry of `shape`."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int] = (), *, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("mean", torch.zeros(tuple(shape)))
        self.register_buffer("variance", torch.ones(tuple(shape)))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, values: Float[Tensor, "*lead_and_shape"], weight: Float[Tensor, "*lead"] | None = None) -> None:
        """Merge a batch (Chan et al.'s parallel formula); rows of weight 0 are left out."""
        rows = ranks.gathered(values.detach().to(self.mean.dtype).reshape(-1, *self.mean.shape))
        if weight is None:
            size: Tensor | int = rows.shape[0]
            batch_mean, batch_variance = rows.mean(0), rows.var(0, unbiased=False)
        else:
            weights = ranks.gathered(weight.detach().to(self.mean.dtype).reshape(-1, *[1] * self.mean.ndim))
            size = weights.sum()
            shares = weights / size.clamp(min=1.0)
            batch_mean = (shares * rows).sum(0)
            batch_variance = (shares * (rows - batch_mean).square()).sum(0)
        total = self.count + size
        share = (size / total.clamp(min=1.0)).to(self.mean.dtype)
        delta = batch_mean - self.mean
        self.variance.lerp_(batch_variance, share).add_(delta.square() * share * (1.0 - share))
        self.mean.add_(delta * share)
        self.count.copy_(total)

    def forward(self, values: Float[Tensor, "*lead_and_shape"]) -> Float[Tensor, "*lead_and_shape"]:
        return (values - self.mean) * torch.rsqrt(self.variance + self.eps)


class LimitsNormalizer(nn.Module):
    """Maps [low, high] of each entry onto [-1, 1], and an entry that hardly varies onto 0. The identity before it has
    seen data."""

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, shape: Sequence[int] = (), *, min_range: float = 1e-4) -> None:
        super().__init__()
        self.min_range = min_range
        self.register_buffer("low", -torch.ones(tuple(shape)))
        self.register_buffer("high", torch.ones(tuple(shape)))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def fit(self, low: Tensor, high: Tensor) -> None:
        """Take these limits from now on."""
        self.low.copy_(low)
        self.high.copy_(high)
        self.seen.fill_(True)

    @torch.no_grad()
    def update(self, values: Float[Tensor, "*lead_and_shape"]) -> None:
        """Widen the limits to what is seen."""
        rows = values.detach().to(self.low.dtype).reshape(-1, *self.low.shape)
        low, high = rows.amin(0), rows.amax(0)
        self.fit(
            torch.where(self.seen, torch.minimum(self.low, low), low),
            torch.where(self.seen, torch.maximum(self.high, high), high),
        )

    def _scale_and_shift(self) -> tuple[Tensor, Tensor]:
        varies = self.high - self.low >= self.min_range
        scale = torch.where(varies, 2.0 / (self.high - self.low).clamp(min=self.min_range), 1.0)
        return scale, torch.where(varies, -1.0, 0.0) - scale * self.low

    def forward(self, values: Float[Tensor, "*lead_and_shape"]) -> Float[Tensor, "*lead_and_shape"]:
        scale, shift = self._scale_and_shift()
        return values * scale + shift

    def inverse(self, values: Float[Tensor, "*lead_and_shape"]) -> Float[Tensor, "*lead_and_shape"]:
        """The values that `forward` gives these for; of an entry that hardly varies, its lower limit and more."""
        scale, shift = self._scale_and_shift()
        return (values - shift) / scale

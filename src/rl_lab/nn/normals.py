"""Normal distributions over latents and actions: plain, bounded, squashed and truncated.

As in `rl_lab.nn.distributions`, `sample` takes its noise as an argument, and all is computed in float32 or better.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab.nn.distributions import NoiseKind, at_least_float32

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def _normal_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return -0.5 * ((value - mean) / std).square() - torch.log(std) - HALF_LOG_TWO_PI


class LatentNormal:
    """A diagonal normal, given by mean and deviation: that of a latent."""

    noise: ClassVar[NoiseKind] = "normal"

    def __init__(self, mean: Float[Tensor, "*lead size"], std: Float[Tensor, "*lead size"]) -> None:
        self.mean, self.std = mean, std

    def detach(self) -> LatentNormal:
        return LatentNormal(self.mean.detach(), self.std.detach())

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead"]:
        return _normal_log_prob(value, self.mean, self.std).sum(-1)

    def entropy(self) -> Float[Tensor, "*lead"]:
        return (torch.log(self.std) + (0.5 + HALF_LOG_TWO_PI)).sum(-1)

    def sample(self, noise: Float[Tensor, "*lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        return self.mean + self.std * (torch.randn_like(self.mean) if noise is None else noise)

    def mode(self) -> Float[Tensor, "*lead size"]:
        return self.mean


class BoundedNormal(LatentNormal):
    """DreamerV3: a plain normal with mean tanh(m) and deviation between 0.1 and 1; samples are not squashed."""

    def __init__(self, params: Float[Tensor, "*lead params"], *, min_std: float = 0.1, max_std: float = 1.0) -> None:
        raw_mean, raw_std = at_least_float32(params).chunk(2, -1)
        super().__init__(torch.tanh(raw_mean), (max_std - min_std) * torch.sigmoid(raw_std + 2.0) + min_std)


def normal_kl(left: LatentNormal, right: LatentNormal) -> Float[Tensor, "*lead"]:
    """KL(left || right), summed over the entries."""
    ratio = left.std / right.std
    distance = (left.mean - right.mean) / right.std
    return (0.5 * (ratio.square() + distance.square() - 1.0) - torch.log(ratio)).sum(-1)


class TanhNormal:
    """Dreamer V1: tanh of a normal with mean 5·tanh(m/5) and deviation softplus(s + offset) + 1e-4.

    The offset makes the deviation `init_std` where s is 0. Entropy and mode have no closed form: both use samples.
    """

    noise: ClassVar[NoiseKind] = "normal"
    edge: ClassVar[float] = 0.99999997  # actions are moved this close to ±1 before the inverse tanh

    def __init__(
        self,
        params: Float[Tensor, "*lead params"],
        *,
        init_std: float = 5.0,
        min_std: float = 1e-4,
        mean_scale: float = 5.0,
        samples: int = 100,
    ) -> None:
        raw_mean, raw_std = at_least_float32(params).chunk(2, -1)
        self.mean = mean_scale * torch.tanh(raw_mean / mean_scale)
        self.std = F.softplus(raw_std + math.log(math.expm1(init_std))) + min_std
        self.samples = samples

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead"]:
        return self._log_prob_before_tanh(torch.atanh(value.clamp(-self.edge, self.edge)))

    def entropy(self, noise: Float[Tensor, "samples *lead size"] | None = None) -> Float[Tensor, "*lead"]:
        """Entropy of the normal, plus the mean log-slope of tanh over samples."""
        slope = _log_tanh_slope(self.mean + self.std * self._many(noise)).mean(0)
        return (torch.log(self.std) + (0.5 + HALF_LOG_TWO_PI) + slope).sum(-1)

    def sample(self, noise: Float[Tensor, "*lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        return torch.tanh(self.mean + self.std * (torch.randn_like(self.mean) if noise is None else noise))

    def mode(self, noise: Float[Tensor, "samples *lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        """The likeliest of the samples: at large deviations the density peaks near ±1, not at tanh(mean)."""
        before = self.mean + self.std * self._many(noise)
        best = self._log_prob_before_tanh(before).argmax(0)
        index = best[None, ..., None].expand(1, *before.shape[1:])
        return torch.tanh(before.gather(0, index)[0])

    def _many(self, noise: Tensor | None) -> Tensor:
        return self.mean.new_empty((self.samples, *self.mean.shape)).normal_() if noise is None else noise

    def _log_prob_before_tanh(self, value: Tensor) -> Tensor:
        return (_normal_log_prob(value, self.mean, self.std) - _log_tanh_slope(value)).sum(-1)


def _log_tanh_slope(x: Tensor) -> Tensor:
    """ln(1 - tanh²(x)), without the loss of precision for large |x|."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


class TruncatedNormal:
    """DreamerV2: a normal with mean tanh(m) and deviation 2·sigmoid(s/2) + 0.1, cut off at ±1."""

    noise: ClassVar[NoiseKind] = "uniform"
    margin: ClassVar[float] = 1e-6  # samples keep this distance from ±1

    def __init__(self, params: Float[Tensor, "*lead params"], *, min_std: float = 0.1) -> None:
        raw_mean, raw_std = at_least_float32(params).chunk(2, -1)
        self.mean = torch.tanh(raw_mean)
        self.std = 2.0 * torch.sigmoid(raw_std / 2.0) + min_std
        self._low, self._high = (-1.0 - self.mean) / self.std, (1.0 - self.mean) / self.std
        self._low_mass = torch.special.ndtr(self._low)
        self._mass = torch.special.ndtr(self._high) - self._low_mass

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead"]:
        """Log-probability of values inside [-1, 1]."""
        return (_normal_log_prob(value, self.mean, self.std) - torch.log(self._mass)).sum(-1)

    def entropy(self) -> Float[Tensor, "*lead"]:
        low_density, high_density = _standard_density(self._low), _standard_density(self._high)
        tilt = (self._low * low_density - self._high * high_density) / (2.0 * self._mass)
        return (torch.log(self.std * self._mass) + (0.5 + HALF_LOG_TWO_PI) + tilt).sum(-1)

    def sample(self, noise: Float[Tensor, "*lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        """By the inverse distribution function; the clip at the edges lets the gradient through."""
        uniform = torch.rand_like(self.mean) if noise is None else noise
        level = (self._low_mass + uniform * self._mass).clamp(1e-7, 1.0 - 1e-7)
        value = self.mean + self.std * torch.special.ndtri(level)
        clipped = value.detach().clamp(-1.0 + self.margin, 1.0 - self.margin)
        return value + (clipped - value.detach())

    def mode(self) -> Float[Tensor, "*lead size"]:
        return self.mean


def _standard_density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x.square() - HALF_LOG_TWO_PI)

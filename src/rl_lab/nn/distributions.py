"""Distributions over actions and latents.

Small and pure: parameters in, tensors out, static shapes. `sample` takes its noise as an argument, so that the noise of
a whole rollout can be drawn at once, outside the loop and outside compiled code; the class attribute `noise` says which
kind. Probabilities are computed in float32 or better. Sampled classes are one-hot vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.math import at_least_float32, identity, in_float32_on_host, one_hot, softmax
from rl_lab.nn.noise_kernel import fill_exponential

NoiseKind = Literal["exponential", "normal", "uniform"]
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_SEEDS = 2**63 - 1  # how many there are of the noise of a call


def draw_noise(
    kind: NoiseKind, shape: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Noise from the device's global generator."""
    empty = torch.empty(tuple(shape), device=device, dtype=dtype)
    if kind == "exponential" and in_float32_on_host(empty):  # a twentieth of the time of `exponential_`
        seed = np.uint64(torch.randint(_SEEDS, ()).item())
        fill_exponential(seed, empty.numpy().reshape(-1))
        return empty
    if kind == "exponential":
        return empty.exponential_()
    return empty.normal_() if kind == "normal" else empty.uniform_()


@runtime_checkable
class Distribution(Protocol):
    """What actors hand out. `value` and samples are encoded actions [*lead, size]; results are [*lead]."""

    noise: ClassVar[NoiseKind]

    def log_prob(self, value: Tensor) -> Tensor: ...

    def entropy(self) -> Tensor: ...

    def sample(self, noise: Tensor | None = None) -> Tensor: ...

    def mode(self) -> Tensor: ...


class UnimixCategorical:
    """Categorical with a uniform share: p = (1 - unimix)·softmax(logits) + unimix/classes, over the last axis.

    Logits of a latent are [*lead, groups, classes]; `log_prob` and `entropy` then are per group.
    """

    noise: ClassVar[NoiseKind] = "exponential"

    def __init__(self, logits: Float[Tensor, "*lead classes"], *, unimix: float = 0.01) -> None:
        self.classes, self.unimix, self.logits = logits.shape[-1], unimix, at_least_float32(logits)
        self._probs: Tensor | None = None  # what is asked for is computed once
        self._log_probs: Tensor | None = None

    @property
    def probs(self) -> Float[Tensor, "*lead classes"]:
        if self._probs is None:
            if self.unimix and in_float32_on_host(self.logits):
                self._probs, self._log_probs = _HostUnimix.apply(self.logits, self.unimix)
            elif self.unimix:
                self._probs = torch.add(softmax(self.logits) * (1.0 - self.unimix), self.unimix / self.classes)
            else:
                self._probs = softmax(self.logits)
        return self._probs

    @property
    def log_probs(self) -> Float[Tensor, "*lead classes"]:
        if self._log_probs is None:
            probs = self.probs  # it may have come with its logarithm
            if self._log_probs is None:
                self._log_probs = torch.log(probs) if self.unimix else torch.log_softmax(self.logits, -1)
        return self._log_probs

    def detach(self) -> UnimixCategorical:
        """The same distribution as a constant. Nothing is computed twice."""
        twin = UnimixCategorical(self.logits.detach(), unimix=self.unimix)
        twin._probs, twin._log_probs = self.probs.detach(), self.log_probs.detach()
        return twin

    def log_prob(self, value: Float[Tensor, "*lead classes"]) -> Float[Tensor, "*lead"]:
        """Of one-hot vectors."""
        return (self.log_probs * value).sum(-1)

    def log_prob_index(self, index: Int[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.log_probs.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Float[Tensor, "*lead"]:
        return -(self.probs * self.log_probs).sum(-1)

    def sample_index(self, noise: Float[Tensor, "*lead classes"] | None = None) -> Int[Tensor, "*lead"]:
        """Class numbers. The first of exponential clocks with rates p rings for class k with probability p_k."""
        if noise is None:
            noise = draw_noise(self.noise, self.logits.shape, self.logits.device, self.logits.dtype)
        return (self._rates() / noise).argmax(-1)

    def _rates(self) -> Tensor:
        """The probabilities, or, where nothing else needs these, numbers in proportion to them."""
        if torch.is_grad_enabled() or self.logits.device.type != "cpu":
            return self.probs.detach()
        weights = (self.logits - self.logits.amax(-1, keepdim=True)).exp_()
        return weights @ _mixing(self.classes, self.unimix, weights.dtype) if self.unimix else weights

    def sample(self, noise: Float[Tensor, "*lead classes"] | None = None) -> Float[Tensor, "*lead classes"]:
        """One-hot, straight-through: the gradient is that of the probabilities."""
        if torch.is_grad_enabled() or not in_float32_on_host(self.logits):
            return self._straight_through(self.sample_index(noise))
        noise = draw_noise(self.noise, self.logits.shape, "cpu") if noise is None else noise
        logits = self.logits.numpy()
        chosen, rows = np.empty(logits.shape, np.float32), (-1, self.classes)
        kernels.sample_one_hot(logits.reshape(rows), noise.numpy().reshape(rows), self.unimix, chosen.reshape(rows))
        return torch.from_numpy(chosen)

    def mode(self) -> Float[Tensor, "*lead classes"]:
        """One-hot of the likeliest class, straight-through."""
        return self._straight_through(self.probs.argmax(-1))

    def _straight_through(self, index: Tensor) -> Tensor:
        hard = one_hot(index, self.classes, self.logits.dtype)
        if torch.is_grad_enabled() and self.probs.requires_grad:
            return hard + (self.probs - self.probs.detach())  # the bracket is exactly 0, so the value stays one-hot
        return hard


class _HostUnimix(torch.autograd.Function):
    """On the CPU: probabilities with a uniform share and their logarithms together, in fewer operations."""

    @staticmethod
    def forward(ctx: Any, logits: Float[Tensor, "*lead classes"], unimix: float) -> tuple[Tensor, Tensor]:
        logits = logits.detach().contiguous()
        probs, log_probs = torch.empty_like(logits), torch.empty_like(logits)
        kernels.unimix_probs(_rows(logits), unimix, _rows(probs), _rows(log_probs))
        ctx.unimix = unimix
        ctx.save_for_backward(probs)
        return probs, log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_probs: Tensor, by_log_probs: Tensor) -> tuple[Tensor, None]:
        (probs,) = ctx.saved_tensors
        by_logits = torch.empty_like(probs)
        given = [_rows(tensor.contiguous()) for tensor in (by_probs, by_log_probs, probs)]
        kernels.unimix_probs_backward(*given, ctx.unimix, _rows(by_logits))
        return by_logits, None


def _rows(x: Tensor) -> np.ndarray:
    return x.view(-1, x.shape[-1]).numpy()


@cache
@torch.inference_mode(False)
def _mixing(classes: int, unimix: float, dtype: torch.dtype) -> Float[Tensor, "classes classes"]:
    """What adds the uniform share to a row of weights of any sum."""
    return identity(classes, dtype) + unimix / ((1.0 - unimix) * classes)


def categorical_kl(left: UnimixCategorical, right: UnimixCategorical) -> Float[Tensor, "*lead"]:
    """KL(left || right) of grouped categoricals [*lead, groups, classes], summed over the groups."""
    return (left.probs * (left.log_probs - right.log_probs)).sum((-2, -1))


class MultiCategorical:
    """Independent categoricals side by side; values are concatenated one-hots, log-probs and entropies are summed."""

    noise: ClassVar[NoiseKind] = "exponential"

    def __init__(self, logits: Float[Tensor, "*lead size"], classes: Sequence[int], *, unimix: float = 0.01) -> None:
        self.classes = list(classes)
        self.parts = [UnimixCategorical(part, unimix=unimix) for part in logits.split(self.classes, -1)]

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead"]:
        values = value.split(self.classes, -1)
        terms = [part.log_prob(own) for part, own in zip(self.parts, values, strict=True)]
        return torch.stack(terms).sum(0)

    def log_prob_index(self, index: Int[Tensor, "*lead components"]) -> Float[Tensor, "*lead"]:
        terms = [part.log_prob_index(own) for part, own in zip(self.parts, index.unbind(-1), strict=True)]
        return torch.stack(terms).sum(0)

    def entropy(self) -> Float[Tensor, "*lead"]:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def sample(self, noise: Float[Tensor, "*lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        noises = [None] * len(self.parts) if noise is None else noise.split(self.classes, -1)
        return torch.cat([part.sample(own) for part, own in zip(self.parts, noises, strict=True)], -1)

    def mode(self) -> Float[Tensor, "*lead size"]:
        return torch.cat([part.mode() for part in self.parts], -1)


def _normal_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return -0.5 * ((value - mean) / std).square() - torch.log(std) - HALF_LOG_TWO_PI


class BoundedNormal:
    """DreamerV3: a plain normal with mean tanh(m) and deviation between 0.1 and 1; samples are not squashed."""

    noise: ClassVar[NoiseKind] = "normal"

    def __init__(self, params: Float[Tensor, "*lead params"], *, min_std: float = 0.1, max_std: float = 1.0) -> None:
        raw_mean, raw_std = at_least_float32(params).chunk(2, -1)
        self.mean = torch.tanh(raw_mean)
        self.std = (max_std - min_std) * torch.sigmoid(raw_std + 2.0) + min_std

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead"]:
        return _normal_log_prob(value, self.mean, self.std).sum(-1)

    def entropy(self) -> Float[Tensor, "*lead"]:
        return (torch.log(self.std) + (0.5 + HALF_LOG_TWO_PI)).sum(-1)

    def sample(self, noise: Float[Tensor, "*lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        return self.mean + self.std * (torch.randn_like(self.mean) if noise is None else noise)

    def mode(self) -> Float[Tensor, "*lead size"]:
        return self.mean


class DiagonalNormal:
    """A plain normal with a given mean and log-deviation: the policy of policy-gradient methods."""

    noise: ClassVar[NoiseKind] = "normal"

    def __init__(self, mean: Float[Tensor, "*lead size"], log_std: Float[Tensor, " size"]) -> None:
        self.mean, self.log_std = at_least_float32(mean), log_std

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead"]:
        scaled = (value - self.mean) * torch.exp(-self.log_std)
        return -0.5 * scaled.square().sum(-1) - (self.log_std + HALF_LOG_TWO_PI).sum()

    def entropy(self) -> Float[Tensor, "*lead"]:
        return (self.log_std + (0.5 + HALF_LOG_TWO_PI)).sum().expand(self.mean.shape[:-1])

    def sample(self, noise: Float[Tensor, "*lead size"] | None = None) -> Float[Tensor, "*lead size"]:
        noise = torch.randn_like(self.mean) if noise is None else noise
        return torch.addcmul(self.mean, torch.exp(self.log_std), noise)

    def mode(self) -> Float[Tensor, "*lead size"]:
        return self.mean


class LatentNormal:
    """A diagonal normal latent, given by mean and deviation."""

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
        """That of the normal, plus the mean log-slope of tanh over samples."""
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
        """Of values inside [-1, 1]."""
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


class Bernoulli:
    """A yes or no, with logits. Targets of `log_prob` may be soft: it is minus the binary cross-entropy."""

    noise: ClassVar[NoiseKind] = "uniform"

    def __init__(self, logits: Float[Tensor, "*lead"]) -> None:
        self.logits = at_least_float32(logits)

    @property
    def mean(self) -> Float[Tensor, "*lead"]:
        return torch.sigmoid(self.logits)

    def log_prob(self, value: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return -F.binary_cross_entropy_with_logits(self.logits, value.to(self.logits.dtype), reduction="none")

    def entropy(self) -> Float[Tensor, "*lead"]:
        return -self.log_prob(self.mean)

    def sample(self, noise: Float[Tensor, "*lead"] | None = None) -> Float[Tensor, "*lead"]:
        probs = self.mean.detach()
        return ((torch.rand_like(probs) if noise is None else noise) < probs).to(probs.dtype)

    def mode(self) -> Float[Tensor, "*lead"]:
        return (self.logits > 0.0).to(self.logits.dtype)

"""Scalar transforms, categorical distributions, and scalars as distributions over bins.

Small and pure: parameters in, tensors out, static shapes. `sample` takes its noise as an argument, so that the noise of
a whole rollout can be drawn at once, outside the loop and outside compiled code; the class attribute `noise` says which
kind. Probabilities are computed in float32 or better. Sampled classes are one-hot vectors. Normal distributions are in
`rl_lab.nn.normals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.errors import ConfigError

NoiseKind = Literal["exponential", "normal", "uniform"]
Spacing = Literal["symexp", "linear"]  # of the bins of a two-hot distribution
FEW_CLASSES = 16  # below one vector register of float32, torch's own operations on a CPU go element by element
FEW_LOGITS = 2048  # up to which their number, and not their size, is what several operations take


def symlog(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """sign(x) ln(1 + |x|): compresses large values, is the identity near 0."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The inverse of `symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Leave half precision: losses and probabilities are computed in float32 (float64 stays float64)."""
    return x if x.dtype == torch.float64 else x.float()


def softmax(logits: Float[Tensor, "*lead classes"]) -> Float[Tensor, "*lead classes"]:
    """Over the last axis. On a CPU torch's own takes four times as long where that axis is short and there is much."""
    if logits.device.type != "cpu" or logits.shape[-1] >= FEW_CLASSES or logits.numel() <= FEW_LOGITS:
        return torch.softmax(logits, -1)
    weights = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def tanh(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """On a CPU, without a gradient, as a sigmoid: torch's own takes three times as long."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return torch.tanh(x)
    return torch.sigmoid(2.0 * x).mul_(2.0).sub_(1.0)


def quantile_of_sorted(ordered: Float[Tensor, " count"], quantile: float) -> Float[Tensor, ""]:
    """Linear interpolation. The place follows from the static size, so nothing is read from the device."""
    place = quantile * (ordered.shape[0] - 1)
    below = int(place)
    above = min(below + 1, ordered.shape[0] - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


@cache
@torch.inference_mode(False)
def _identity(size: int, dtype: torch.dtype) -> Float[Tensor, "size size"]:
    return torch.eye(size, dtype=dtype)


def one_hot(index: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*lead classes"]:
    """One-hot vectors of integer `index` [*lead]; unlike `F.one_hot` it never reads a value back to the host."""
    if index.device.type == "cpu" and classes <= FEW_CLASSES:
        return torch.embedding(_identity(classes, dtype), index.long())
    zeros = torch.zeros(*index.shape, classes, dtype=dtype, device=index.device)
    return zeros.scatter_(-1, index.long().unsqueeze(-1), 1.0)


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products: that of autocast where autocast is on, float32 elsewhere."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


def draw_noise(
    kind: NoiseKind, shape: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Noise from the device's global generator. Exponential noise is -ln u: several times as fast as `exponential_`."""
    noise = torch.empty(tuple(shape), device=device, dtype=dtype)
    if kind == "exponential":
        return noise.uniform_().neg_().add_(1.0).log_().neg_()  # 1 - u is never 0
    return noise.normal_() if kind == "normal" else noise.uniform_()


@runtime_checkable
class Distribution(Protocol):
    """The interface of an actor's distribution. `value` and samples are encoded actions [*lead, size]; results are
    [*lead]."""

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
        self._probs: Tensor | None = None  # computed once, when first asked for
        self._log_probs: Tensor | None = None

    @property
    def probs(self) -> Float[Tensor, "*lead classes"]:
        if self._probs is None:
            probs = softmax(self.logits)
            self._probs = probs * (1.0 - self.unimix) + self.unimix / self.classes if self.unimix else probs
        return self._probs

    @property
    def log_probs(self) -> Float[Tensor, "*lead classes"]:
        if self._log_probs is None:
            self._log_probs = torch.log(self.probs) if self.unimix else torch.log_softmax(self.logits, -1)
        return self._log_probs

    def detach(self) -> UnimixCategorical:
        """The same distribution as a constant. Nothing is computed twice."""
        twin = UnimixCategorical(self.logits.detach(), unimix=self.unimix)
        twin._probs, twin._log_probs = self.probs.detach(), self.log_probs.detach()
        return twin

    def log_prob(self, value: Float[Tensor, "*lead classes"]) -> Float[Tensor, "*lead"]:
        """Log-probability of one-hot vectors."""
        return (self.log_probs * value).sum(-1)

    def log_prob_index(self, index: Int[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.log_probs.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Float[Tensor, "*lead"]:
        return -(self.probs * self.log_probs).sum(-1)

    def sample_index(self, noise: Float[Tensor, "*lead classes"] | None = None) -> Int[Tensor, "*lead"]:
        """Class numbers. The first of exponential clocks with rates p rings for class k with probability p_k."""
        if noise is None:
            noise = draw_noise(self.noise, self.logits.shape, self.logits.device, self.logits.dtype)
        return (self.probs.detach() / noise).max(-1).indices  # on a CPU in half the time of argmax

    def sample(self, noise: Float[Tensor, "*lead classes"] | None = None) -> Float[Tensor, "*lead classes"]:
        """One-hot, straight-through: the gradient is that of the probabilities."""
        return self._straight_through(self.sample_index(noise))

    def mode(self) -> Float[Tensor, "*lead classes"]:
        """One-hot of the likeliest class, straight-through."""
        return self._straight_through(self.probs.argmax(-1))

    def _straight_through(self, index: Tensor) -> Tensor:
        hard = one_hot(index, self.classes, self.logits.dtype)
        if torch.is_grad_enabled() and self.probs.requires_grad:
            return hard + (self.probs - self.probs.detach())  # the bracket is exactly 0, so the value stays one-hot
        return hard


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


class TwoHot(nn.Module):
    """`bins` values from -symexp(limit) to +symexp(limit), dense around an exact 0 in the middle.

    Targets are raw values (no symlog), predictions are means in raw space, and everything is float32 or better. With
    `spacing: linear` the bins are equally spaced from -limit to +limit, and stand for symlog values: the target is
    squashed, and the prediction is symexp of the mean.
    """

    bins: Tensor
    edges: Tensor

    def __init__(self, bins: int = 255, limit: float = 20.0, spacing: Spacing = "symexp") -> None:
        super().__init__()
        if bins < 3 or bins % 2 == 0:
            raise ConfigError(f"bins={bins}: two-hot needs an odd number of at least 3, so that one bin is exactly 0.")
        if limit <= 0:
            raise ConfigError(f"limit={limit}: the symlog range of the two-hot bins must be positive.")
        self.center, self.spacing = (bins - 1) // 2, spacing
        negative = torch.linspace(-limit, 0.0, self.center + 1, dtype=torch.float64)
        negative = symexp(negative) if spacing == "symexp" else negative
        values = torch.cat([negative, -negative[:-1].flip(0)]).float()
        self.largest = float(values[-1])
        self.register_buffer("bins", values, persistent=False)  # rebuilt from the settings, so not saved
        # A buffer of its own: on CUDA, Inductor's bucketize ignores the offset of a sliced view.
        self.register_buffer("edges", values[1:-1].clone(), persistent=False)

    @property
    def size(self) -> int:
        """The number of logits."""
        return self.bins.shape[0]

    def mean(self, logits: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        """Expected value. Each bin is paired with its mirror image, so uniform logits give exactly 0."""
        probs = torch.softmax(at_least_float32(logits), -1)
        surplus = probs[..., self.center + 1 :] - probs[..., : self.center].flip(-1)
        mean = (surplus * self.bins[self.center + 1 :]).sum(-1)
        return mean if self.spacing == "symexp" else symexp(mean)

    def loss(self, logits: Float[Tensor, "*lead bins"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        """Cross-entropy with the two-hot encoding of `target`, which is not materialised and gets no gradient."""
        return self.losses(logits, target)[0]

    def losses(self, logits: Float[Tensor, "*lead bins"], *targets: Float[Tensor, "*lead"]) -> list[Tensor]:
        """The same for several targets: one softmax serves all of them."""
        log_probs = torch.log_softmax(at_least_float32(logits), -1)
        return [self._cross_entropy(log_probs, target) for target in targets]

    def _cross_entropy(self, log_probs: Tensor, target: Tensor) -> Tensor:
        target = target.detach().to(log_probs.dtype)
        target = target if self.spacing == "symexp" else symlog(target)
        target = target.clamp(-self.largest, self.largest)
        lower = torch.bucketize(target.contiguous(), self.edges.to(log_probs.dtype), right=True)
        neighbours = torch.stack([lower, lower + 1], -1)
        below, above = self.bins[neighbours].unbind(-1)
        upper_mass = (target - below) / (above - below)
        chosen = log_probs.gather(-1, neighbours)
        return -torch.lerp(chosen[..., 0], chosen[..., 1], upper_mass)


class PlainScalar(nn.Module):
    """One number, and the squared error."""

    size = 1

    def mean(self, output: Float[Tensor, "*lead 1"]) -> Float[Tensor, "*lead"]:
        return at_least_float32(output).squeeze(-1)

    def loss(self, output: Float[Tensor, "*lead 1"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return (self.mean(output) - target.detach()).square()


def make_scalar(bins: int, limit: float) -> TwoHot | PlainScalar:
    """TD-MPC's networks output a plain number with one bin, and two-hot logits of its symlog with more."""
    return PlainScalar() if bins == 1 else TwoHot(bins, limit, "linear")

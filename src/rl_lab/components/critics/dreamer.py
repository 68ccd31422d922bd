"""Critics with slowly following copies of themselves, and the scale of the returns that they learn."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab import ranks
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import Spacing, TwoHot, quantile_of_sorted
from rl_lab.nn.layers import Head
from rl_lab.nn.styles import StyleLike, layer_style


class SlowTarget(nn.Module):
    """A copy of a network that is not trained, but moves towards it: slow += rate·(fast - slow).

    `rate=1` with `every=100` is a hard copy each hundredth update. It starts equal to the network, is saved with it,
    and its parameters do not require gradients, so that they are neither optimised nor counted.
    """

    updates: Tensor

    def __init__(self, network: nn.Module, *, rate: float, every: int) -> None:
        super().__init__()
        if not 0.0 < rate <= 1.0 or every < 1:
            raise ConfigError(f"slow_rate={rate}, slow_every={every}: expected 0 < slow_rate <= 1 and slow_every >= 1.")
        self.rate, self.every = rate, every
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead out"]:
        return self.network(features)

    @torch.no_grad()
    def update(self, source: nn.Module) -> None:
        """Call once after each optimiser step."""
        if self.every > 1:
            updates = self.updates.add_(1)
            if updates.is_cpu and int(updates) % self.every > 0:
                return
        slow: list[Tensor] = list(self.network.parameters())
        fast: list[Tensor] = list(source.parameters())
        if self.every == 1 or self.updates.is_cpu:
            torch._foreach_lerp_(slow, fast, self.rate)
            return
        # The weight is a tensor: whether this update is due is decided on the device.
        weight = (self.updates % self.every == 0).to(slow[0].dtype) * self.rate
        for slow_tensor, fast_tensor in zip(slow, fast, strict=True):
            slow_tensor.lerp_(fast_tensor, weight)


class Critic(nn.Module, ABC):
    """The value of a state. `forward` is the trained network, `slow` its slow copy; both give raw float32 outputs.

    Without a `slow_rate` there is no slow copy.
    """

    def __init__(self, head: Head, *, slow_rate: float | None, slow_every: int) -> None:
        super().__init__()
        self.head = head
        self.slow = None if slow_rate is None else SlowTarget(head, rate=slow_rate, every=slow_every)

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead out"]:
        return self.head(features)

    @abstractmethod
    def mean(self, output: Float[Tensor, "*lead out"]) -> Float[Tensor, "*lead"]: ...

    @abstractmethod
    def loss(self, output: Float[Tensor, "*lead out"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]: ...

    def losses(self, output: Float[Tensor, "*lead out"], *targets: Float[Tensor, "*lead"]) -> list[Tensor]:
        """One for each target."""
        return [self.loss(output, target) for target in targets]

    def slow_mean(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead"]:
        """The slow copy's prediction."""
        assert self.slow is not None
        return self.mean(self.slow(features))

    def update_slow(self) -> None:
        """Call once after each optimiser step."""
        if self.slow is not None:
            self.slow.update(self.head)


class TwoHotCritic(Critic):
    """DreamerV3's critic: a distribution over bins; starts by predicting exactly 0."""

    def __init__(
        self,
        *,
        feature_size: int,
        units: int = 256,
        layers: int = 3,
        bins: int = 255,
        limit: float = 20.0,
        spacing: Spacing = "symexp",
        outscale: float = 0.0,
        slow_rate: float | None = 0.02,
        slow_every: int = 1,
        style: StyleLike = None,
    ) -> None:
        head = Head(feature_size, bins, units=units, layers=layers, outscale=outscale, style=layer_style(style))
        super().__init__(head, slow_rate=slow_rate, slow_every=slow_every)
        self.two_hot = TwoHot(bins, limit, spacing)

    def mean(self, output: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        return self.two_hot.mean(output)

    def loss(self, output: Float[Tensor, "*lead bins"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.two_hot.loss(output, target)

    def losses(self, output: Float[Tensor, "*lead bins"], *targets: Float[Tensor, "*lead"]) -> list[Tensor]:
        if type(self).loss is not TwoHotCritic.loss or "loss" in vars(self):
            return super().losses(output, *targets)
        return self.two_hot.losses(output, *targets)  # the softmax is computed once for all of them


class ScalarCritic(Critic):
    """One number; the loss is (v - target)²/2, a normal's negative log-likelihood without its constant."""

    def __init__(
        self,
        *,
        feature_size: int,
        units: int = 256,
        layers: int = 3,
        outscale: float = 1.0,
        slow_rate: float | None = 0.02,
        slow_every: int = 1,
        style: StyleLike = None,
    ) -> None:
        head = Head(feature_size, 1, units=units, layers=layers, outscale=outscale, style=layer_style(style))
        super().__init__(head, slow_rate=slow_rate, slow_every=slow_every)

    def mean(self, output: Float[Tensor, "*lead 1"]) -> Float[Tensor, "*lead"]:
        return output.squeeze(-1)

    def loss(self, output: Float[Tensor, "*lead 1"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return 0.5 * (output.squeeze(-1) - target.detach()).square()


class ReturnNormalizer(nn.Module):
    """The spread of returns: an exponential average of a low and a high percentile, both from 0, not bias-corrected.

    The divisor is never below `limit`, so that small returns are not blown up; the offset is not used for advantages.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, *, rate: float = 0.01, low_quantile: float = 0.05, high_quantile: float = 0.95, limit: float = 1.0
    ) -> None:
        super().__init__()
        self.rate, self.limit = rate, limit
        self.low_quantile, self.high_quantile = low_quantile, high_quantile
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @torch.no_grad()
    def update(self, values: Float[Tensor, "*shape"]) -> None:
        """Take these in, unless one of them is not finite: a failed update must not leave a trace."""
        values = values.detach().flatten()
        values = ranks.gathered(values) if ranks.several else values
        ordered = values.to(self.low.dtype).sort().values  # infinities and NaN are at the ends
        rate = torch.isfinite(ordered[0] - ordered[-1]).to(ordered.dtype) * self.rate
        for average, quantile in ((self.low, self.low_quantile), (self.high, self.high_quantile)):
            average.lerp_(torch.nan_to_num(quantile_of_sorted(ordered, quantile)), rate)

    def scale(self) -> Float[Tensor, ""]:
        """The divisor."""
        return (self.high - self.low).clamp(min=self.limit)

    def forward(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
        """Take these returns in, then give the divisor."""
        self.update(values)
        return self.scale()

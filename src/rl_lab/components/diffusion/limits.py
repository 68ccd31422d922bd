"""Values brought to [-1, 1] by the limits of a dataset."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

CONSTANT = 1e-4  # a range below this: the entry never changes


class LimitsNormalizer(nn.Module):
    """x → 2·(x - low) / (high - low) - 1, entry by entry. An entry that never changes is 0."""

    low: Tensor
    high: Tensor
    fitted: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("low", -torch.ones(size))
        self.register_buffer("high", torch.ones(size))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    def fit(self, low: Tensor, high: Tensor) -> None:
        """Take these limits, once."""
        if not self.fitted:
            self.low.copy_(low)
            self.high.copy_(high)
            self.fitted.fill_(True)

    @property
    def _half(self) -> Tensor:
        half = 0.5 * (self.high - self.low)
        return torch.where(2.0 * half < CONSTANT, torch.ones_like(half), half)

    def forward(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        return (value - 0.5 * (self.low + self.high)) / self._half

    def inverse(self, unit: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        return unit * self._half + 0.5 * (self.low + self.high)

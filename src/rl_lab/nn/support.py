"""Scalars as categorical distributions over a transformed range, as in MuZero (Schrittwieser et al., 2020)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import at_least_float32

EPSILON = 1e-3  # keeps the transform invertible


def squash(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """h(x) = sign(x)·(√(|x| + 1) - 1) + εx: grows like a square root."""
    return torch.sign(x) * (torch.sqrt(torch.abs(x) + 1.0) - 1.0) + EPSILON * x


def unsquash(y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The inverse of `squash`."""
    root = (torch.sqrt(1.0 + 4.0 * EPSILON * (torch.abs(y) + 1.0 + EPSILON)) - 1.0) / (2.0 * EPSILON)
    return torch.sign(y) * (root.square() - 1.0)


class Support(nn.Module):
    """Bins from -limit to +limit in the space of `squash`, `limit / (bins - 1) · 2` apart.

    A target is spread over its two neighbouring bins and compared by cross-entropy; a prediction is the inverse
    transform of the expected bin. Targets beyond the range are clipped (`outside` tells which).
    """

    bins: Tensor

    def __init__(self, *, bins: int = 601, limit: float = 300.0) -> None:
        super().__init__()
        if bins < 3 or bins % 2 == 0 or limit <= 0.0:
            raise ConfigError(f"bins={bins}, limit={limit}: expected an odd number of at least 3, and limit > 0.")
        self.size, self.limit, self.step = bins, float(limit), 2.0 * limit / (bins - 1)
        self.register_buffer("bins", torch.linspace(-limit, limit, bins), persistent=False)

    def mean(self, logits: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        """The expected value, in raw units."""
        return unsquash((torch.softmax(at_least_float32(logits), -1) * self.bins).sum(-1))

    def loss(self, logits: Float[Tensor, "*lead bins"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        """Cross-entropy with the two-hot encoding of raw targets."""
        place = (squash(target.detach()).clamp(-self.limit, self.limit) + self.limit) / self.step
        lower = place.floor().clamp(max=self.size - 2)
        neighbours = torch.stack([lower, lower + 1.0], -1).long()
        chosen = torch.log_softmax(at_least_float32(logits), -1).gather(-1, neighbours)
        return -torch.lerp(chosen[..., 0], chosen[..., 1], place - lower)

    def outside(self, target: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which raw targets the bins cannot represent."""
        return squash(target).abs() > self.limit

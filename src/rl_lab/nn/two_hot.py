"""Scalars as network outputs: categorical distributions over bins, or plain numbers."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.math import at_least_float32, symexp, symlog

Spacing = Literal["symexp", "linear"]


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
        logits = at_least_float32(logits)
        target = target.detach().to(logits.dtype)
        target = target if self.spacing == "symexp" else symlog(target)
        target = target.clamp(-self.largest, self.largest)
        lower = torch.bucketize(target.contiguous(), self.edges.to(logits.dtype), right=True)
        neighbours = torch.stack([lower, lower + 1], -1)
        ends = self.bins[neighbours]
        upper_mass = (target - ends[..., 0]) / (ends[..., 1] - ends[..., 0])
        chosen = torch.log_softmax(logits, -1).gather(-1, neighbours)
        return -torch.lerp(chosen[..., 0], chosen[..., 1], upper_mass)


class PlainScalar(nn.Module):
    """One number, and the squared error."""

    size = 1

    def mean(self, output: Float[Tensor, "*lead 1"]) -> Float[Tensor, "*lead"]:
        return at_least_float32(output).squeeze(-1)

    def loss(self, output: Float[Tensor, "*lead 1"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return (self.mean(output) - target.detach()).square()


def make_scalar(bins: int, limit: float) -> TwoHot | PlainScalar:
    """How TD-MPC's networks put out a number: with one bin as it is, with more by two-hot regression of its symlog."""
    return PlainScalar() if bins == 1 else TwoHot(bins, limit, "linear")

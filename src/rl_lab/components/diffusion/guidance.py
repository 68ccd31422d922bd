"""Hooks into a sampler: everything that steers what a diffusion model draws."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class ReverseStep(NamedTuple):
    """One step of the reverse process, from x at `level` to mean + std·noise at `next_level` (-1: the clean sample)."""

    level: int
    next_level: int
    x: Float[Tensor, "batch time dim"]
    clean: Float[Tensor, "batch time dim"]  # x_0 as the network predicts it from x
    mean: Float[Tensor, "batch time dim"]
    std: float


class Guidance:
    """Changes nothing; a subclass overrides what it needs. The sampler calls the hooks without recording gradients:
    one that differentiates does so inside `torch.enable_grad()`.

    In each step: `before`, then the network, then `mean`, then noise; `constrain` follows the first draw, `before` and
    the noise, so that what it imposes holds in everything the network sees and in the result.
    """

    def before(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        """x before the network sees it: gradient steps on a value of the noisy sequence, or resampling of the batch."""
        return x

    def mean(self, step: ReverseStep) -> Float[Tensor, "batch time dim"]:
        """The mean of the step, for guidance that shifts it: mean + scale·std²·gradient."""
        return step.mean

    def constrain(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        """x with what is known put in its place; `level` is that of x, -1 for the result."""
        return x


class Inpainting(Guidance):
    """Some entries are known: `values` where `known`, as clean as they are, at every level."""

    def __init__(self, values: Float[Tensor, "batch time dim"], known: Bool[Tensor, "time dim"]) -> None:
        self.values, self.known = values, known

    def constrain(self, x: Float[Tensor, "batch time dim"], level: int) -> Float[Tensor, "batch time dim"]:
        return torch.where(self.known, self.values.to(x.dtype), x)

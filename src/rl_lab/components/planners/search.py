"""The distribution that candidates are drawn from, and how it is fitted to those that did well."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Search(NamedTuple):
    """Mean and deviation of every entry; a one-hot's mean is its classes' probabilities."""

    mean: Float[Tensor, "env horizon action"]
    std: Float[Tensor, "env horizon action"]


def moments(
    chosen: Float[Tensor, "env chosen horizon action"], weight: Float[Tensor, "env chosen"]
) -> tuple[Float[Tensor, "env horizon action"], Float[Tensor, "env horizon action"]]:
    """Weighted mean and variance of sequences; the weights of an environment sum to 1."""
    weight = weight[:, :, None, None]
    mean = (weight * chosen).sum(1)
    return mean, (weight * (chosen - mean[:, None]).square()).sum(1)

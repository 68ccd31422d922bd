"""The interface of representation learners: an observation becomes a Gaussian over latents, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

EXACT = -20.0  # the log-variance of a code without noise: small, and still a number in half precision


class Encoding(NamedTuple):
    """A diagonal Gaussian over latents."""

    mean: Float[Tensor, "*lead latent"]
    log_variance: Float[Tensor, "*lead latent"]

    def sample(self) -> Float[Tensor, "*lead latent"]:
        return self.mean + torch.exp(0.5 * self.log_variance) * torch.randn_like(self.mean)

    def at(self, index: Tensor | slice) -> Encoding:
        """The Gaussians that an index of the leading dimensions chooses."""
        return Encoding(self.mean[index], self.log_variance[index])


class Representation(nn.Module, ABC):
    """Learns from single observations, without their order, actions or rewards."""

    latent_size: int
    trains = True  # False: there is nothing to learn, `losses` is never called

    @abstractmethod
    def encode(self, observation: Mapping[str, Tensor]) -> Encoding:
        """`observation[key]` is [*lead, *shape], as stored: uint8 images, numeric vectors."""

    @abstractmethod
    def decode(self, latent: Float[Tensor, "*lead latent"]) -> dict[str, Tensor]:
        """The observation that a latent stands for, by key; images are floats from 0 to 1."""

    @abstractmethod
    def losses(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`total`, which is minimised, and its parts: scalars, means over all observations of the batch."""

    def wiring(self) -> dict[str, str]:
        """For the plan of a run: what becomes of each key."""
        return {}


def exact(mean: Float[Tensor, "*lead latent"]) -> Encoding:
    """The encoding of a learner whose code has no noise."""
    return Encoding(mean, torch.full_like(mean, EXACT))

"""Mixtures of Gaussians, one for each dimension of a vector."""

from __future__ import annotations

from math import log, pi
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class GaussianMixtures(NamedTuple):
    """Every dimension has a mixture of its own, independent of the others."""

    logits: Float[Tensor, "*lead size mixtures"]
    mean: Float[Tensor, "*lead size mixtures"]
    log_std: Float[Tensor, "*lead size mixtures"]

    def log_prob(self, value: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        """log Σ_k π_k N(value; μ_k, σ_k²) of each dimension."""
        scaled = (value[..., None] - self.mean) * torch.exp(-self.log_std)
        log_normal = -0.5 * scaled.square() - self.log_std - 0.5 * log(2.0 * pi)
        return torch.logsumexp(self.logits.log_softmax(-1) + log_normal, -1)

    def sample(self, temperature: float = 1.0) -> Float[Tensor, "*lead size"]:
        """A draw. The temperature τ divides the logits and multiplies the variances: p_k ∝ exp(logits_k / τ), then
        μ_k + σ_k √τ ε. At 0 it is the mean of the likeliest component."""
        if temperature == 0.0:
            chosen = self.logits.argmax(-1, keepdim=True)
            return self.mean.gather(-1, chosen).squeeze(-1)
        noise = -torch.log(-torch.log(torch.rand_like(self.logits).clamp(1e-20, 1.0 - 1e-7)))  # Gumbel
        chosen = (self.logits / temperature + noise).argmax(-1, keepdim=True)
        mean, log_std = (part.gather(-1, chosen).squeeze(-1) for part in (self.mean, self.log_std))
        return mean + torch.exp(log_std) * temperature**0.5 * torch.randn_like(mean)

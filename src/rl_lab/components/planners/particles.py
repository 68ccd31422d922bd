"""Weighted particles: weights in log space, effective sample size, evidence and resampling. Pure functions."""

from __future__ import annotations

from math import log

import torch
from jaxtyping import Float, Int
from torch import Tensor


def uniform_log_weights(envs: int, count: int, like: Tensor) -> Float[Tensor, "env particle"]:
    """ln(1 / N) for every particle."""
    return like.new_full((envs, count), -log(count))


def reweight(
    log_weights: Float[Tensor, "env particle"], increment: Float[Tensor, "env particle"]
) -> tuple[Float[Tensor, "env particle"], Float[Tensor, " env"]]:
    """Normalised ln w_i + increment_i, and ln Σ_i w_i exp(increment_i): the factor by which the evidence grows.

    An increment of -inf kills a particle. Where none is left, the weights stay as they were and the factor is -inf.
    """
    weighted = log_weights + increment
    evidence = weighted.logsumexp(1)
    return torch.where(evidence.isfinite()[:, None], weighted.log_softmax(1), log_weights), evidence


def effective_sample_size(log_weights: Float[Tensor, "env particle"]) -> Float[Tensor, " env"]:
    """1 / Σ w²: N where all weigh the same, 1 where one has everything. The weights are normalised."""
    return (-(2.0 * log_weights).logsumexp(1)).exp()


def kl_from_prior(
    log_weights: Float[Tensor, "env particle"],
    tilt: Float[Tensor, "env particle"],
    log_evidence: Float[Tensor, " env"],
) -> Float[Tensor, " env"]:
    """KL(p ‖ p0) = E_p[βR] - ln Z in nats, for p ∝ p0·exp(βR) with particles of p, their `tilt` βR, and ln Z."""
    weights = log_weights.exp()
    return torch.where(weights > 0, weights * tilt, 0.0).sum(1) - log_evidence


def systematic(
    log_weights: Float[Tensor, "env particle"], offset: Float[Tensor, " env"]
) -> Int[Tensor, "env particle"]:
    """N positions, particle i about N·w_i times: one uniform `offset` in [0, 1) shifts a comb of N equal steps."""
    count = log_weights.shape[1]
    cumulated = log_weights.exp().cumsum(1)
    cumulated = cumulated / cumulated[:, -1:]
    comb = (torch.arange(count, device=offset.device) + offset[:, None]) / count
    return torch.searchsorted(cumulated.contiguous(), comb.to(cumulated.dtype), right=True).clamp(max=count - 1)

"""Weighted particles: weights in log space, effective sample size, evidence and resampling."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Particles(NamedTuple):
    """Sequences on their way from noise to plans, and the bookkeeping of their weights."""

    x: Float[Tensor, "row time dim"]  # rows are environments × candidates
    log_weights: Float[Tensor, "env candidate"]  # normalised
    log_evidence: Float[Tensor, " env"]  # ln Z so far
    potential: Float[Tensor, "env candidate"]  # ᾱβR(x̂_0) that is in the weights already
    spread: Float[Tensor, " env"]  # deviation of the returns under the prior, as far as it is known

    @classmethod
    def begin(cls, x: Float[Tensor, "row time dim"], *, envs: int) -> Particles:
        """Equal weights that know no return yet."""
        none = x.new_zeros(envs)
        count = len(x) // envs
        return cls(x, uniform_log_weights(envs, count, x), none, none[:, None].expand(-1, count), none)

    def weighed(self, potential: Float[Tensor, "env candidate"]) -> Particles:
        """With exp(potential) in the weights, in place of the potential that is in them. -inf kills a particle."""
        both = potential.isfinite() & self.potential.isfinite()
        increment = torch.where(both, potential - self.potential, -torch.inf)
        log_weights, factor = reweight(self.log_weights, increment)
        return self._replace(log_weights=log_weights, log_evidence=self.log_evidence + factor, potential=potential)

    def resampled(self, offset: Float[Tensor, " env"], *, below: float) -> Particles:
        """In environments whose share of effective samples is less than `below`: drawn anew by weight, then equal."""
        envs, count = self.log_weights.shape
        own = torch.arange(count, device=self.x.device).expand(envs, count)
        few = effective_sample_size(self.log_weights) < below * count
        chosen = torch.where(few[:, None], systematic(self.log_weights, offset), own)
        rows = chosen + count * torch.arange(envs, device=self.x.device)[:, None]
        return self._replace(
            x=self.x[rows.flatten()],
            potential=self.potential.gather(1, chosen),
            log_weights=torch.where(few[:, None], uniform_log_weights(envs, count, self.log_weights), self.log_weights),
        )


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


# The spread of returns ------------------------------------------------------------------------------------------------


def spread_of(returns: Float[Tensor, "env candidate"]) -> Float[Tensor, " env"]:
    """The deviation of those returns of an environment that are finite."""
    finite = returns.isfinite()
    count = finite.sum(1).clamp(min=1)
    mean = torch.where(finite, returns, 0.0).sum(1) / count
    return (torch.where(finite, returns - mean[:, None], 0.0).square().sum(1) / count).sqrt()


def widest_spread(
    known: Float[Tensor, " env"], returns: Float[Tensor, "env candidate"], expected_spread: float
) -> Float[Tensor, " env"]:
    """The larger of the known spread and that of these returns. Returns of expected sequences differ about as much less
    than those of clean ones as the sequences do, by the factor `expected_spread`."""
    return torch.maximum(known, spread_of(returns) / expected_spread) if expected_spread > 0.0 else known

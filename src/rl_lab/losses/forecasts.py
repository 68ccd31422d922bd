"""How good one-step forecasts of a vector are."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.nn.mixtures import GaussianMixtures


def forecast_quality(
    value: Float[Tensor, "batch time size"],
    forecast: GaussianMixtures,
    shuffled: GaussianMixtures,
    valid: Float[Tensor, "batch before"],
    active: Bool[Tensor, " size"],
) -> dict[str, Tensor]:
    """Losses in nats for each active dimension: of the forecast of the next value, of the best Gaussian around the
    present one, and of a forecast from the actions of other sequences; and the share of dimensions in which the
    forecast beats that Gaussian.

    Forecasts are of [batch, time - 1]; `valid` is 0 where no successor exists.
    """
    weight, following = valid[..., None] / valid.sum().clamp(min=1.0), value[:, 1:]
    loss, mixed = (-(weight * part.log_prob(following)).sum((0, 1)) for part in (forecast, shuffled))
    change = (weight * (following - value[:, :-1]).square()).sum((0, 1))
    stays = 0.5 * (2.0 * torch.pi * torch.e * change.clamp(min=1e-12)).log()
    used = active.sum().clamp(min=1)
    return {
        "m_loss": (active * loss).sum() / used,
        "m_loss_if_nothing_changed": (active * stays).sum() / used,
        "m_loss_shuffled_actions": (active * mixed).sum() / used,
        "m_share_better": (active * (loss < stays)).sum() / used,
        "active_dimensions": active.sum(),
    }

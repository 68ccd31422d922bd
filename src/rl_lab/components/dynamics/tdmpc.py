"""The world model of TD-MPC and TD-MPC2: what follows an action, in a latent space that nothing is decoded from."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import make_scalar
from rl_lab.nn.tdmpc_layers import TDMPCMLP, EnsembleMLP, Style, hidden_layers, linear, simplex_layer

DISCOUNT_RANGE = (0.95, 0.995)


class TDMPCStep(NamedTuple):
    """Raw outputs of one step."""

    latent: Float[Tensor, "rows latent"]
    reward: Float[Tensor, "rows bins"]


def episode_discount(length: int | None) -> float:
    """TD-MPC2's rule: 1 / (1 - γ) is a fifth of an episode of `length` decisions."""
    low, high = DISCOUNT_RANGE
    return high if length is None else min(max(1.0 - 5.0 / length, low), high)


class TDMPCModel(nn.Module):
    """z' = d(z, a), the reward R(z, a), and with `episodic` the probability that the episode ends in z'.

    Dynamics and reward have hidden layers of one shape on the same input, so both are computed as one batched product.
    """

    def __init__(
        self,
        *,
        latent_size: int,
        action_size: int,
        units: int,
        layers: int,
        simplex: int | None,
        bins: int,  # 1: the reward is one number with a squared error
        limit: float,  # of the bins, in symlog space
        episodic: bool,  # whether episodes can end before their time limit
        discount: float | Literal["auto"],
        episode_length: int | None,  # in decisions, for discount=auto
        style: Style,
    ) -> None:
        super().__init__()
        if discount != "auto" and not 0.0 < discount <= 1.0:
            raise ConfigError(f"discount={discount}: expected auto, or a number above 0 and at most 1.")
        self.latent_size, self.episodic = latent_size, episodic
        self.discount = episode_discount(episode_length) if discount == "auto" else float(discount)
        self.scalar = make_scalar(bins, limit)
        hidden = hidden_layers(style, units, layers)
        self.trunks = EnsembleMLP(2, latent_size + action_size, hidden, style=style)
        self.latent_output = (
            linear(units, latent_size, style=style)
            if simplex is None
            else simplex_layer(units, latent_size, simplex, style=style)
        )
        self.reward_output = linear(units, self.scalar.size, style=style, zero=True)
        self.termination = TDMPCMLP(latent_size, hidden, 1, style=style) if episodic else None

    def step(self, latent: Float[Tensor, "rows latent"], action: Float[Tensor, "rows action"]) -> TDMPCStep:
        dynamics, reward = self.trunks(torch.cat([latent, action.to(latent.dtype)], -1)).unbind(0)
        return TDMPCStep(self.latent_output(dynamics), self.reward_output(reward))

    def reward_mean(self, output: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        return self.scalar.mean(output)

    def reward_loss(
        self, output: Float[Tensor, "*lead bins"], reward: Float[Tensor, "*lead"]
    ) -> Float[Tensor, "*lead"]:
        return self.scalar.loss(output, reward)

    def termination_logit(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead"]:
        """Logit of the probability that the episode has ended on arriving at this latent; only where `episodic`."""
        assert self.termination is not None
        return self.termination(latent).squeeze(-1).float()

    def continuation(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead"]:
        """Probability that the episode goes on; without `episodic` it is 1."""
        if self.termination is None:
            return torch.ones_like(latent[..., 0], dtype=torch.float32)
        return torch.sigmoid(-self.termination_logit(latent))

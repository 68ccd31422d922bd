"""The world model of TD-MPC and TD-MPC2: what follows an action, in a latent space that nothing is decoded from."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.errors import ConfigError
from rl_lab.nn.fusion import uses_kernels
from rl_lab.nn.latent_mlp import (
    EnsembleMLP,
    LatentMLP,
    Style,
    check_simplex,
    fused_norm_simplex,
    hidden_layers,
    init_weight_,
    sim_norm,
)
from rl_lab.nn.two_hot import make_scalar

DISCOUNT_RANGE = (0.95, 0.995)


class LatentStep(NamedTuple):
    """Raw outputs of one step."""

    latent: Float[Tensor, "rows latent"]
    reward: Float[Tensor, "rows bins"]


def episode_discount(length: int | None) -> float:
    """TD-MPC2's rule: an episode of `length` decisions is five times as long as what is cared about."""
    low, high = DISCOUNT_RANGE
    return high if length is None else min(max(1.0 - 5.0 / length, low), high)


class LatentModel(nn.Module):
    """z' = d(z, a), the reward R(z, a), and with `episodic` the probability that the episode ends in z'.

    Dynamics and reward have hidden layers of one shape on the same input, so both are computed as one batched product.
    """

    def __init__(
        self,
        *,
        latent_size: int,
        action_size: int,
        units: int = 512,
        layers: int = 2,
        simplex: int | None = 8,
        bins: int = 101,  # 1: the reward is one number with a squared error
        limit: float = 10.0,  # of the bins, in symlog space
        episodic: bool = True,  # whether episodes can end before their time limit
        discount: float | Literal["auto"] = "auto",
        episode_length: int | None = None,  # in decisions, for discount=auto
        style: Style = "tdmpc2",
    ) -> None:
        super().__init__()
        if discount != "auto" and not 0.0 < discount <= 1.0:
            raise ConfigError(f"discount={discount}: expected auto, or a number above 0 and at most 1.")
        self.latent_size, self.simplex, self.episodic = latent_size, simplex, episodic
        self.discount = episode_discount(episode_length) if discount == "auto" else float(discount)
        self.scalar = make_scalar(bins, limit)
        hidden = hidden_layers(style, units, layers)
        self.trunks = EnsembleMLP(2, latent_size + action_size, hidden, style=style)
        self.latent_output = nn.Linear(units, latent_size)
        self.latent_norm = nn.Identity() if simplex is None else nn.LayerNorm(latent_size)
        self.reward_output = nn.Linear(units, self.scalar.size)
        if simplex is not None:
            check_simplex(latent_size, simplex)
        for linear, zero in ((self.latent_output, False), (self.reward_output, True)):
            init_weight_(linear.weight, style, zero=zero)
            nn.init.zeros_(linear.bias)
        self.termination = LatentMLP(latent_size, hidden, 1, style=style) if episodic else None
        self.fused = False

    def fuse(self) -> bool:
        """Run on kernels of our own from now on, where no gradient is asked for. False: there are none for it."""
        parts = [self.trunks, self.scalar, *([] if self.termination is None else [self.termination])]
        self.fused = self.simplex is not None and self.simplex.bit_count() == 1 and all(part.fuse() for part in parts)
        return self.fused

    def step(self, latent: Float[Tensor, "rows latent"], action: Float[Tensor, "rows action"]) -> LatentStep:
        dynamics, reward = self.trunks(self.trunks.join(latent, action)).unbind(0)
        following = self.latent_output(dynamics)
        if self.simplex is not None and uses_kernels(self.fused):
            following = fused_norm_simplex(following, self.latent_norm, self.simplex, width=self.trunks.width)
        else:
            following = self.latent_norm(following)
            following = following if self.simplex is None else sim_norm(following, self.simplex)
        return LatentStep(following, self.reward_output(reward))

    def reward_mean(self, output: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        return self.scalar.mean(output)

    def reward_loss(
        self, output: Float[Tensor, "*lead bins"], reward: Float[Tensor, "*lead"]
    ) -> Float[Tensor, "*lead"]:
        return self.scalar.loss(output, reward)

    def termination_logit(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead"]:
        """Of having ended on arriving at this latent; only where `episodic`."""
        assert self.termination is not None
        return self.termination(latent).squeeze(-1).float()

    def continuation(self, latent: Float[Tensor, "*lead latent"]) -> Float[Tensor, "*lead"]:
        """The probability that the episode goes on; without `episodic` it always does."""
        if self.termination is None:
            return torch.ones_like(latent[..., 0], dtype=torch.float32)
        return torch.sigmoid(-self.termination_logit(latent))

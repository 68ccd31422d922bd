"""Predictors of reward and continuation."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.nn.distributions import Bernoulli
from rl_lab.nn.layers import Head
from rl_lab.nn.two_hot import TwoHot


class RewardPredictor(nn.Module):
    """The reward on arriving at a state, as a two-hot distribution; starts by predicting exactly 0."""

    def __init__(
        self, *, feature_size: int, units: int = 256, layers: int = 1, bins: int = 255, limit: float = 20.0,
        outscale: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.two_hot = TwoHot(bins, limit)
        self.head = Head(feature_size, bins, units=units, layers=layers, outscale=outscale)

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead bins"]:
        return self.head(features)

    def mean(self, logits: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        return self.two_hot.mean(logits)

    def loss(self, logits: Float[Tensor, "*lead bins"], reward: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.two_hot.loss(logits, reward)


class ContinuePredictor(nn.Module):
    """The discount on arriving at a state: `discount` while the episode lives, 0 where it has ended.

    The label is soft, so the prediction already contains the discount: do not multiply by it again.
    """

    def __init__(
        self, *, feature_size: int, units: int = 256, layers: int = 1, discount: float = 1.0 - 1.0 / 333.0,
        outscale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.discount = discount
        self.head = Head(feature_size, 1, units=units, layers=layers, outscale=outscale)

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead"]:
        """One logit."""
        return self.head(features).squeeze(-1)

    def mean(self, logits: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return torch.sigmoid(logits)

    def loss(self, logits: Float[Tensor, "*lead"], terminal: Bool[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        """`terminal` is `is_terminal`, never `is_last`: a truncated episode would have gone on."""
        label = (1.0 - terminal.to(logits.dtype)) * self.discount
        return -Bernoulli(logits).log_prob(label)

"""Predictors of reward and continuation."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.nn.distributions import Bernoulli, Spacing, TwoHot
from rl_lab.nn.layers import Head
from rl_lab.nn.styles import StyleLike, layer_style


class UnitNormal(nn.Module):
    """A number as the mean of a normal with deviation 1: the loss is half the squared error, without the constant."""

    size = 1

    def mean(self, output: Float[Tensor, "*lead 1"]) -> Float[Tensor, "*lead"]:
        return output.squeeze(-1)

    def loss(self, output: Float[Tensor, "*lead 1"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return 0.5 * (output.squeeze(-1) - target.detach()).square()


class RewardPredictor(nn.Module):
    """The reward on arriving at a state: a two-hot distribution (DreamerV3), which starts by predicting exactly 0 with
    its `outscale` of 0, or a unit normal (PlaNet, Dreamer v1 and v2). With `squash: tanh` it is tanh of the reward that
    is learned, and that dreams are paid in."""

    def __init__(
        self, *, feature_size: int, units: int = 256, layers: int = 1,
        distribution: Literal["two_hot", "unit_normal"] = "two_hot", bins: int = 255, limit: float = 20.0,
        spacing: Spacing = "symexp", squash: Literal["none", "tanh"] = "none", outscale: float = 0.0,
        style: StyleLike = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.squash = squash
        self.distribution = TwoHot(bins, limit, spacing) if distribution == "two_hot" else UnitNormal()
        self.head = Head(
            feature_size, self.distribution.size, units=units, layers=layers, outscale=outscale,
            style=layer_style(style),
        )  # fmt: skip

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead out"]:
        return self.head(features)

    def mean(self, output: Float[Tensor, "*lead out"]) -> Float[Tensor, "*lead"]:
        return self.distribution.mean(output)

    def loss(self, output: Float[Tensor, "*lead out"], reward: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.distribution.loss(output, torch.tanh(reward) if self.squash == "tanh" else reward)


class ContinuePredictor(nn.Module):
    """The discount on arriving at a state: `discount` while the episode lives, 0 where it has ended.

    A soft label is that number, and `mean` the expected one. A hard label is 1 or 0, and `mean` is `discount` wherever
    the episode more likely lives than not. Either way it contains the discount: do not multiply by it again.
    """

    def __init__(
        self, *, feature_size: int, units: int = 256, layers: int = 1, discount: float = 1.0 - 1.0 / 333.0,
        label: Literal["soft", "hard"] = "soft", outscale: float = 1.0, style: StyleLike = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.discount, self.label = discount, label
        self.head = Head(feature_size, 1, units=units, layers=layers, outscale=outscale, style=layer_style(style))

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead"]:
        """One logit."""
        return self.head(features).squeeze(-1)

    def mean(self, logits: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        if self.label == "hard":
            return self.discount * Bernoulli(logits).mode()
        return torch.sigmoid(logits)

    def loss(self, logits: Float[Tensor, "*lead"], terminal: Bool[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        """`terminal` is `is_terminal`, never `is_last`: a truncated episode would have gone on."""
        alive = 1.0 - terminal.to(logits.dtype)
        return -Bernoulli(logits).log_prob(alive * self.discount if self.label == "soft" else alive)

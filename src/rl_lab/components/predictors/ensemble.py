"""Several reward predictors in the place of one: their mean, and how far they disagree."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.predictors.heads import RewardPredictor
from rl_lab.errors import ConfigError


class RewardEnsemble(RewardPredictor):
    """`members` predictors that differ in their first weights, trained on the same rewards.

    Where they disagree, no reward was seen nearby. The predicted reward is the mean of their means, less `pessimism`
    times their standard deviation, so that a dream does not pay for states that were never visited. The outputs of all
    members are one vector, so that the ensemble can stand wherever a single predictor does.
    """

    def __init__(self, *, members: int = 5, pessimism: float = 0.0, outscale: float = 1.0, **settings: Any) -> None:
        if members < 2:
            raise ConfigError(f"members={members}: an ensemble has at least 2. Take the single predictor `reward`.")
        super().__init__(outscale=outscale, **settings)
        self.members, self.pessimism = members, pessimism
        others = [RewardPredictor(outscale=outscale, **settings).head for _ in range(members - 1)]
        self.others = nn.ModuleList(others)

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead out"]:
        return torch.cat([self.head(features), *(head(features) for head in self.others)], -1)

    def means(self, output: Float[Tensor, "*lead out"]) -> Float[Tensor, "*lead members"]:
        """The reward that each member expects."""
        return self.distribution.mean(output.unflatten(-1, (self.members, -1)))

    def mean(self, output: Float[Tensor, "*lead out"]) -> Float[Tensor, "*lead"]:
        means = self.means(output)
        return means.mean(-1) - self.pessimism * means.std(-1, correction=0)

    def loss(self, output: Float[Tensor, "*lead out"], reward: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        """The mean of the members' losses."""
        parts = output.unflatten(-1, (self.members, -1)).unbind(-2)
        return torch.stack([super(RewardEnsemble, self).loss(part, reward) for part in parts], -1).mean(-1)

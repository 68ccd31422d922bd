"""Which action leads from one state to the next."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.nn.plain_mlp import PlainMLP


class InverseDynamics(nn.Module):
    """(s, s') → the encoded action between them; states are normalised."""

    def __init__(self, *, state_size: int, action_size: int, units: int, layers: int) -> None:
        super().__init__()
        self.network = PlainMLP(2 * state_size, action_size, units=units, layers=layers)

    def forward(
        self, state: Float[Tensor, "*lead state"], following: Float[Tensor, "*lead state"]
    ) -> Float[Tensor, "*lead action"]:
        return self.network(torch.cat([state, following], -1))

    def loss(
        self,
        state: Float[Tensor, "*lead state"],
        following: Float[Tensor, "*lead state"],
        action: Float[Tensor, "*lead action"],
    ) -> Float[Tensor, ""]:
        """The squared error."""
        return (self(state, following) - action).square().mean()

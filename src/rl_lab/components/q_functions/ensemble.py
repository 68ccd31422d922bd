"""Several action values of a latent state as one batched network, with a slowly following copy."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.components.critics.dreamer import SlowTarget
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import make_scalar
from rl_lab.nn.tdmpc_layers import EnsembleMLP, Style, value_layers


class QEnsemble(nn.Module):
    """Q_1 … Q_n of a latent and an action; TD-MPC has two, TD-MPC2 five of which two are drawn at a time."""

    def __init__(
        self,
        *,
        latent_size: int,
        action_size: int,
        members: int,
        units: int,
        layers: int,
        dropout: float,  # in the first layer, while learning
        bins: int,  # 1: a value is one number with a squared error
        limit: float,  # of the bins, in symlog space
        target_rate: float,
        target_every: int,
        style: Style,
    ) -> None:
        super().__init__()
        if members < 2 or not 0.0 <= dropout < 1.0:
            raise ConfigError(
                f"members={members}, dropout={dropout}: expected at least 2 members, and a dropout from 0 to below 1."
            )
        self.members, self.dropout, self.units = members, dropout, units
        self.scalar = make_scalar(bins, limit)
        self.online = EnsembleMLP(
            members, latent_size + action_size, value_layers(style, units, layers), self.scalar.size, style=style,
            zero_output=True,
        )  # fmt: skip
        self.slow = SlowTarget(self.online, rate=target_rate, every=target_every)

    def draw_pair(self) -> Int[Tensor, " 2"]:
        """The numbers of two different members."""
        return torch.rand(self.members, device=next(self.parameters()).device).topk(2).indices

    def draw_keep(self, members: int, rows: int) -> Float[Tensor, "members rows units"] | None:
        """A dropout mask for the first layer, divided by the share that is kept; None without dropout."""
        if self.dropout == 0.0:
            return None
        noise = torch.empty(members, rows, self.units, device=next(self.parameters()).device)
        return noise.bernoulli_(1.0 - self.dropout).div_(1.0 - self.dropout)

    def forward(
        self,
        latent: Float[Tensor, "rows latent"],
        action: Float[Tensor, "rows action"],
        *,
        keep: Float[Tensor, "chosen rows units"] | None = None,
        members: Int[Tensor, " chosen"] | None = None,
        frozen: bool = False,
    ) -> Float[Tensor, "chosen rows bins"]:
        """Raw outputs of all members, or of some. `frozen`: the gradient passes through, but not into the Qs."""
        inputs = torch.cat([latent, action.to(latent.dtype)], -1)
        return self.online(inputs, keep=keep, members=members, frozen=frozen)

    def target(
        self,
        latent: Float[Tensor, "rows latent"],
        action: Float[Tensor, "rows action"],
        members: Int[Tensor, " chosen"],
    ) -> Float[Tensor, "chosen rows bins"]:
        """Raw outputs of the slow copy, which has no dropout."""
        return self.slow.network(torch.cat([latent, action], -1), members=members)

    def mean(self, output: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        return self.scalar.mean(output)

    def loss(self, output: Float[Tensor, "*lead bins"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.scalar.loss(output, target)

    def update_slow(self) -> None:
        self.slow.update(self.online)

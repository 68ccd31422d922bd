"""Several action values of a latent state as one batched network, with a slowly following copy."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.components.controllers.critics import SlowTarget
from rl_lab.errors import ConfigError
from rl_lab.nn.latent_mlp import EnsembleMLP, Style, value_layers
from rl_lab.nn.two_hot import make_scalar


class QEnsemble(nn.Module):
    """Q_1 … Q_n of a latent and an action; TD-MPC has two, TD-MPC2 five of which two are drawn at a time."""

    def __init__(
        self,
        *,
        latent_size: int,
        action_size: int,
        members: int = 5,
        units: int = 512,
        layers: int = 2,
        dropout: float = 0.01,  # in the first layer, while learning
        bins: int = 101,  # 1: a value is one number with a squared error
        limit: float = 10.0,  # of the bins, in symlog space
        target_rate: float = 0.01,
        target_every: int = 1,
        style: Style = "tdmpc2",
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

    def fuse(self) -> bool:
        """Run the online values on kernels of our own from now on, where no gradient is asked for."""
        return self.online.fuse() and self.scalar.fuse()

    def draw_pair(self) -> Int[Tensor, " 2"]:
        """Two different members, without asking the host."""
        return torch.rand(self.members, device=next(self.parameters()).device).topk(2).indices

    def draw_keep(self, members: int, rows: int) -> Float[Tensor, "members rows units"] | None:
        """What dropout keeps, or nothing to drop."""
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
        """Raw outputs of all members, or of some. `frozen`: for the policy, whose gradient passes through."""
        return self.online(self.online.join(latent, action), keep=keep, members=members, frozen=frozen)

    def target(
        self,
        latent: Float[Tensor, "rows latent"],
        action: Float[Tensor, "rows action"],
        members: Int[Tensor, " chosen"],
    ) -> Float[Tensor, "chosen rows bins"]:
        """Of the slow copy, which has no dropout."""
        return self.slow.network(torch.cat([latent, action], -1), members=members)

    def mean(self, output: Float[Tensor, "*lead bins"]) -> Float[Tensor, "*lead"]:
        return self.scalar.mean(output)

    def loss(self, output: Float[Tensor, "*lead bins"], target: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        return self.scalar.loss(output, target)

    def update_slow(self) -> None:
        self.slow.update(self.online)

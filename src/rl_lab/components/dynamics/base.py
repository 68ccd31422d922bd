"""Models of what an action changes in the observation: one network or an ensemble, trained on transitions.

Inputs (observation and action) and targets (the change) are brought to unit scale by running statistics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import e, factorial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rl_lab.components.observations import ObservationVector
from rl_lab.components.spaces import SpecLike, action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.member_mlp import MemberMLP
from rl_lab.nn.normalizers import RunningMeanStd
from rl_lab.specs import ActionSpec

INPUT_CLIP = 10.0  # deviations
VARIANCE_FLOOR = 1e-6  # what is constant stays small
VALIDATION_RATE = 0.05  # of the running average by which members are ranked
HELD_OUT = -1  # the "member" whose hash decides which records are held out
# Cumulative probabilities of Poisson(1): a uniform number u stands for as many draws as there are entries up to u.
POISSON = torch.tensor([sum(1.0 / factorial(k) for k in range(count + 1)) / e for count in range(8)])


class Dynamics(nn.Module, ABC):
    """`members` independent networks. Rows are [members, rows, …]: each member has its own.

    With `elites` fewer than members, only those that do best on held-out transitions are planned with.
    """

    validation_loss: Tensor
    elite_members: Tensor

    def __init__(
        self,
        *,
        observation: Mapping[str, SpecLike],
        action: ActionSpec | Mapping[str, object],
        outputs: int,  # of the network, for each entry of the observation
        members: int,
        elites: int | None,  # null: all members
        units: int,
        layers: int,
        validation_share: float = 0.1,  # of the transitions; only where elites are chosen
    ) -> None:
        super().__init__()
        elites = members if elites is None else elites
        if members < 1 or not 1 <= elites <= members:
            raise ConfigError(f"members={members}, elites={elites}: expected at least one, and no more elites.")
        if not 0.0 < validation_share < 1.0:
            raise ConfigError(f"validation_share={validation_share}: expected more than 0 and less than 1.")
        self.vector = ObservationVector(observation)
        self.observation_size, self.action_size = self.vector.size, action_spec(action).encoded_size
        self.members, self.elites, self.validation_share = members, elites, validation_share
        inputs = self.observation_size + self.action_size
        self.network = MemberMLP(members, inputs, outputs * self.observation_size, units=units, layers=layers)
        self.inputs = RunningMeanStd((inputs,), eps=VARIANCE_FLOOR)
        self.changes = RunningMeanStd((self.observation_size,), eps=VARIANCE_FLOOR)
        self.register_buffer("validation_loss", torch.zeros(members))
        self.register_buffer("elite_members", torch.arange(elites))

    # Predicting -------------------------------------------------------------------------------------------------------

    def features(self, observation: Float[Tensor, "*lead observation"]) -> Float[Tensor, "*lead observation"]:
        """An observation at unit scale: what policies and values see of it."""
        size = self.observation_size
        scale = torch.rsqrt(self.inputs.variance[:size] + VARIANCE_FLOOR)
        return ((observation - self.inputs.mean[:size]) * scale).clamp(-INPUT_CLIP, INPUT_CLIP)

    def predict(
        self,
        observation: Float[Tensor, "elites rows observation"],
        action: Float[Tensor, "elites rows action"],
        *,
        sample: bool,
    ) -> Float[Tensor, "elites rows observation"]:
        """The next observations by each elite member: drawn, or expected."""
        members = None if self.elites == self.members else self.elite_members
        change = self.change(self._raw(observation, action, members), sample=sample)
        return observation + self.changes.mean + change * torch.sqrt(self.changes.variance + VARIANCE_FLOOR)

    def expect(
        self, observation: Float[Tensor, "rows observation"], action: Float[Tensor, "rows action"]
    ) -> Float[Tensor, "rows observation"]:
        """The mean of what the elite members expect."""
        rows = (self.elites, -1, -1)
        return self.predict(observation.expand(*rows), action.expand(*rows), sample=False).mean(0)

    def _raw(self, observation: Tensor, action: Tensor, members: Int[Tensor, " elites"] | None = None) -> Tensor:
        normal = self.inputs(torch.cat([observation, action], -1)).clamp(-INPUT_CLIP, INPUT_CLIP)
        return self.network(normal, members)

    @abstractmethod
    def change(
        self, raw: Float[Tensor, "some rows outputs"], *, sample: bool
    ) -> Float[Tensor, "some rows observation"]:
        """The change at unit scale that the network's outputs stand for."""

    # Learning ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def negative_log_likelihood(
        self, raw: Float[Tensor, "members rows outputs"], change: Float[Tensor, "members rows observation"]
    ) -> Float[Tensor, "members rows"]:
        """Negative log-likelihood of changes at unit scale, up to a constant; the mean over the entries."""

    def regularizer(self) -> Tensor:
        """A term of the loss that does not depend on data."""
        return self.changes.mean.new_zeros(())

    def loss(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
        valid: Bool[Tensor, " rows"],
        record: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of all members, and metrics. Each member learns from its own bootstrap of the data.

        `record` are the transitions' numbers. They decide once and for all how often each member counts a transition,
        and which ones are held out to rank members by. Without numbers every member counts everything once.
        """
        everyone = (self.members, -1, -1)
        losses = self._losses(observation.expand(*everyone), action.expand(*everyone), following.expand(*everyone))
        held_out = self._held_out(observation.shape[0], record, observation.device)
        weight = (valid & ~held_out).to(losses.dtype) * self.bootstrap_counts(record)
        by_member = (losses * weight).sum(1) / weight.expand_as(losses).sum(1).clamp(min=1.0)
        if self.elites < self.members:
            self._rank(losses.detach(), valid & held_out)
        loss = by_member.sum() + self.regularizer()
        metrics = {"dynamics": by_member.mean()}
        if self.members > 1:
            metrics["dynamics_spread"] = by_member.amax() - by_member.amin()
        return loss, metrics

    def bootstrap_counts(self, record: Int[Tensor, " rows"] | None) -> Float[Tensor, "members rows"] | float:
        """The number of times that each record is in each member's bootstrap: Poisson(1), the limit of resampling with
        replacement for many records. A function of record and member alone, so it stays the same while data grows."""
        if record is None or self.members == 1:
            return 1.0
        uniform = torch.stack([hashed(record, member) for member in range(self.members)])
        return torch.bucketize(uniform, POISSON.to(uniform), right=True).to(uniform.dtype)

    def _losses(self, observation: Tensor, action: Tensor, following: Tensor) -> Tensor:
        change = (following - observation - self.changes.mean) * torch.rsqrt(self.changes.variance + VARIANCE_FLOOR)
        return self.negative_log_likelihood(self._raw(observation, action), change)

    def _held_out(self, rows: int, record: Tensor | None, device: torch.device) -> Bool[Tensor, " rows"]:
        if self.elites == self.members or record is None:
            return torch.zeros(rows, dtype=torch.bool, device=device)
        # A fixed pseudo-random share: whole stretches would all come from one episode.
        return hashed(record, HELD_OUT) < self.validation_share

    @torch.no_grad()
    def _rank(self, losses: Float[Tensor, "members rows"], rows: Bool[Tensor, " rows"]) -> None:
        """Follow each member's loss on held-out rows, and choose the elites by it."""
        weight = rows.to(losses.dtype)
        fresh = (losses * weight).sum(1) / weight.sum().clamp(min=1.0)
        rate = VALIDATION_RATE * (fresh.isfinite().all() & rows.any()).to(fresh.dtype)
        self.validation_loss.lerp_(fresh.nan_to_num(0.0, 0.0, 0.0), rate)
        self.elite_members.copy_(self.validation_loss.topk(self.elites, largest=False).indices)

    def update_statistics(
        self,
        observation: Float[Tensor, "rows observation"],
        action: Float[Tensor, "rows action"],
        following: Float[Tensor, "rows observation"],
        valid: Bool[Tensor, " rows"],
    ) -> None:
        """Take these transitions into the scales of inputs and changes."""
        weight = valid.to(observation.dtype)
        self.inputs.update(torch.cat([observation, action], -1), weight)
        self.changes.update(following - observation, weight)


def hashed(record: Int[Tensor, " rows"], member: int) -> Float[Tensor, " rows"]:
    """A pseudo-random number in [0, 1) for each record, independent between members (a 32-bit integer hash)."""
    mask = 0xFFFF_FFFF
    x = (record + (member + 2) * 0x9E37_79B9) & mask
    x = ((x ^ (x >> 16)) * 0x21F0_AAAD) & mask
    x = ((x ^ (x >> 15)) * 0x735A_2D97) & mask
    return ((x ^ (x >> 15)) >> 8).to(torch.float32) / (1 << 24)

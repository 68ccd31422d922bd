"""Policies and value heads of policy-gradient methods: plain networks with orthogonal weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.actors.action_distributions import ActionDistribution, Categoricals, DiagonalNormal
from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.plain_mlp import Activation, PlainMLP
from rl_lab.specs import ActionSpec


class Policy(nn.Module, ABC):
    """`forward` gives the parameters of π(·|s), `distribution` the distribution that they stand for."""

    action_kind: ClassVar[Literal["continuous", "discrete"]]

    def __init__(
        self,
        *,
        feature_size: int,
        action: ActionSpec | Mapping[str, Any],
        units: int,
        layers: int,
        activation: Activation,
        output_gain: float | None,  # of orthogonal weights; null: torch's own weights in all layers
    ) -> None:
        super().__init__()
        self.spec = action_spec(action)
        if self.spec.kind != self.action_kind:
            raise ConfigError(
                f"{type(self).__name__} is for {self.action_kind} actions, but the environment's are {self.spec.kind}."
            )
        self.head = PlainMLP(
            feature_size, self.spec.encoded_size,
            units=units, layers=layers, activation=activation, output_gain=output_gain,
        )  # fmt: skip

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead params"]:
        return self.head(features)

    @abstractmethod
    def distribution(self, params: Float[Tensor, "*lead params"]) -> ActionDistribution: ...


class SoftmaxPolicy(Policy):
    """Discrete actions: independent categoricals, one for each component of the action."""

    action_kind = "discrete"

    def distribution(self, params: Float[Tensor, "*lead params"]) -> ActionDistribution:
        return Categoricals(params, self.spec.classes)


class GaussianPolicy(Policy):
    """Continuous actions: a normal whose deviation does not depend on the state. Actions are not clipped here."""

    action_kind = "continuous"

    def __init__(self, *, log_std: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_std = nn.Parameter(torch.full((self.spec.encoded_size,), float(log_std)))

    def distribution(self, params: Float[Tensor, "*lead params"]) -> ActionDistribution:
        return DiagonalNormal(params, self.log_std, self.spec.shape)


def make_policy(*, action: ActionSpec | Mapping[str, Any], log_std: float, **arguments: Any) -> Policy:
    """The policy that the action space calls for; `log_std` is the initial one of a Gaussian."""
    spec = action_spec(action)
    if spec.kind == "discrete":
        return SoftmaxPolicy(action=spec, **arguments)
    return GaussianPolicy(action=spec, log_std=log_std, **arguments)


class ValueHead(nn.Module):
    """The value v(s) of a state, one number."""

    def __init__(
        self, *, feature_size: int, units: int, layers: int, activation: Activation, output_gain: float | None
    ) -> None:
        super().__init__()
        self.head = PlainMLP(
            feature_size, 1, units=units, layers=layers, activation=activation, output_gain=output_gain
        )

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead"]:
        return self.head(features).squeeze(-1)

"""Policies and value heads of policy-gradient methods: plain networks with orthogonal weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.distributions import DiagonalNormal, MultiCategorical, UnimixCategorical
from rl_lab.nn.orthogonal import Activation, OrthogonalHead
from rl_lab.specs import ActionSpec


class Policy(nn.Module, ABC):
    """`forward` gives raw parameters, `distribution` what they mean. Actions are stored ones, not encoded."""

    action_kind: ClassVar[Literal["continuous", "discrete"]]

    def __init__(
        self,
        *,
        feature_size: int,
        action: ActionSpec | Mapping[str, Any],
        units: int = 64,
        layers: int = 2,
        activation: Activation = "tanh",
        output_gain: float | None = 0.01,  # null: torch's own weights in all layers
    ) -> None:
        super().__init__()
        self.spec = action_spec(action)
        if self.spec.kind != self.action_kind:
            raise ConfigError(
                f"{type(self).__name__} is for {self.action_kind} actions, but the environment's are {self.spec.kind}."
            )
        size = self.spec.encoded_size
        self.head = OrthogonalHead(
            feature_size, size, units=units, layers=layers, activation=activation, gain=output_gain
        )

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead params"]:
        return self.head(features)

    @abstractmethod
    def evaluate(
        self, params: Float[Tensor, "*lead params"], action: Shaped[Tensor, "*stored"]
    ) -> tuple[Float[Tensor, "*lead"], Float[Tensor, "*lead"]]:
        """Log-probability of stored actions, and the entropy."""

    @abstractmethod
    def choose(self, params: Float[Tensor, "rows params"], *, greedy: bool) -> Shaped[Tensor, rows * action]:
        """Stored actions: the likeliest, or drawn with torch's generator. Few operations: it runs at every step."""


class SoftmaxPolicy(Policy):
    """Discrete actions: independent categoricals, one per component."""

    action_kind = "discrete"

    def distribution(self, params: Float[Tensor, "*lead params"]) -> UnimixCategorical | MultiCategorical:
        if len(self.spec.classes) == 1:
            return UnimixCategorical(params, unimix=0.0)
        return MultiCategorical(params, self.spec.classes, unimix=0.0)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        distribution = self.distribution(params)
        index = action.squeeze(-1) if len(self.spec.classes) == 1 else action
        return distribution.log_prob_index(index), distribution.entropy()

    def choose(self, params: Tensor, *, greedy: bool) -> Tensor:
        # Logits minus the logarithm of exponential noise: their maximum falls on class k with probability p_k.
        scores = params if greedy else params - torch.empty_like(params).exponential_().log_()
        if len(self.spec.classes) == 1:
            return scores.argmax(-1, keepdim=True).to(torch.int32)
        return torch.stack([part.argmax(-1) for part in scores.split(self.spec.classes, -1)], -1).to(torch.int32)


class GaussianPolicy(Policy):
    """Continuous actions: a normal whose deviation does not depend on the state. Actions are not clipped here."""

    action_kind = "continuous"

    def __init__(self, *, log_std: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_std = nn.Parameter(torch.full((self.spec.encoded_size,), float(log_std)))

    def distribution(self, params: Float[Tensor, "*lead params"]) -> DiagonalNormal:
        return DiagonalNormal(params, self.log_std)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        distribution = self.distribution(params)
        return distribution.log_prob(action.reshape(params.shape)), distribution.entropy()

    def choose(self, params: Tensor, *, greedy: bool) -> Tensor:
        action = params if greedy else self.distribution(params).sample()
        return action.reshape(-1, *self.spec.shape)


def make_policy(
    *, action: ActionSpec | Mapping[str, Any], log_std: float = 0.0, **arguments: Any
) -> SoftmaxPolicy | GaussianPolicy:
    """The policy that the action space calls for; `log_std` is the initial one of a Gaussian."""
    spec = action_spec(action)
    if spec.kind == "discrete":
        return SoftmaxPolicy(action=spec, **arguments)
    return GaussianPolicy(action=spec, log_std=log_std, **arguments)


class ValueHead(nn.Module):
    """The value of a state, one number."""

    def __init__(
        self,
        *,
        feature_size: int,
        units: int = 64,
        layers: int = 2,
        activation: Activation = "tanh",
        output_gain: float | None = 1.0,
    ) -> None:
        super().__init__()
        self.head = OrthogonalHead(feature_size, 1, units=units, layers=layers, activation=activation, gain=output_gain)

    def forward(self, features: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead"]:
        return self.head(features).squeeze(-1)

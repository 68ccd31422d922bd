"""Policies and value heads of policy-gradient methods: plain networks with orthogonal weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from rl_lab.components.spaces import action_spec
from rl_lab.errors import ConfigError
from rl_lab.nn.arrays import Array, as_tensor, flags, library, noise_like, row_numbers
from rl_lab.nn.distributions import HALF_LOG_TWO_PI
from rl_lab.nn.orthogonal import OrthogonalHead
from rl_lab.nn.plain_mlp import Activation
from rl_lab.specs import ActionSpec


class Evaluation(NamedTuple):
    """What a policy says of actions; and the backward pass, written out, so that no graph is needed."""

    log_prob: Array  # [*lead]
    entropy: Array  # [*lead]
    # Takes the derivative by each log-probability and that by every entropy, gives that by `params`, and adds to the
    # gradients of the policy's parameters beside its network.
    backward: Callable[[Array, float], Array]


class Policy(nn.Module, ABC):
    """`forward` gives raw parameters, `evaluate` and `choose` know what they mean. Actions are stored ones."""

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

    def forward(self, features: Array) -> Array:
        """[*lead, features] → [*lead, params]"""
        return self.head.forward(features)

    @abstractmethod
    def evaluate(self, params: Array, action: Array) -> Evaluation:
        """Stored actions under `params` [*lead, params]; arrays or tensors, see `rl_lab.nn.arrays`."""

    @abstractmethod
    def choose(self, params: Array, *, greedy: bool) -> Array:
        """[rows, *action]: the likeliest, or drawn with torch's generator. Few operations: it runs at every step."""


class SoftmaxPolicy(Policy):
    """Discrete actions: independent categoricals, one per component."""

    action_kind = "discrete"

    @torch.no_grad()
    def evaluate(self, params: Array, action: Array) -> Evaluation:
        xp, ends = library(params), accumulate(self.spec.classes)
        parts = [
            _evaluate_softmax(params[..., end - size : end], action[..., component])
            for component, (size, end) in enumerate(zip(self.spec.classes, ends, strict=True))
        ]
        if len(parts) == 1:
            return parts[0]
        return Evaluation(
            sum(part.log_prob for part in parts),
            sum(part.entropy for part in parts),
            lambda slope, by_entropy: xp.concatenate([part.backward(slope, by_entropy) for part in parts], -1),
        )

    def choose(self, params: Array, *, greedy: bool) -> Array:
        xp = library(params)
        # Logits minus the logarithm of exponential noise: their maximum falls on class k with probability p_k.
        scores = params if greedy else params - xp.log(noise_like(params, "exponential"))
        if len(self.spec.classes) == 1:
            return scores.argmax(-1)[..., None]
        ends = accumulate(self.spec.classes)
        return xp.stack(
            [scores[..., end - size : end].argmax(-1) for size, end in zip(self.spec.classes, ends, strict=True)], -1
        )


class GaussianPolicy(Policy):
    """Continuous actions: a normal whose deviation does not depend on the state. Actions are not clipped here."""

    action_kind = "continuous"

    def __init__(self, *, log_std: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_std = nn.Parameter(torch.full((self.spec.encoded_size,), float(log_std)))

    @torch.no_grad()
    def evaluate(self, params: Array, action: Array) -> Evaluation:
        log_std = self._log_std(params)
        inverse = library(params).exp(-log_std)
        z = (action.reshape(params.shape) - params) * inverse
        log_prob = (-0.5 * z * z - (log_std + HALF_LOG_TWO_PI)).sum(-1)
        entropy = (log_std + (0.5 + HALF_LOG_TWO_PI)).sum() + 0.0 * log_prob

        def backward(slope: Array, by_entropy: float) -> Array:
            slope = slope[..., None]
            by_log_std = (slope * (z * z - 1.0)).reshape(-1, len(log_std)).sum(0)
            by_log_std = as_tensor(by_log_std) + by_entropy * len(slope.reshape(-1))
            self.log_std.grad = by_log_std if self.log_std.grad is None else self.log_std.grad.add_(by_log_std)
            return slope * z * inverse

        return Evaluation(log_prob, entropy, backward)

    def choose(self, params: Array, *, greedy: bool) -> Array:
        if not greedy:
            params = params + library(params).exp(self._log_std(params)) * noise_like(params, "normal")
        return params.reshape(-1, *self.spec.shape)

    def _log_std(self, params: Array) -> Array:
        value = self.log_std.detach()
        return value.numpy() if isinstance(params, np.ndarray) else value


def _evaluate_softmax(logits: Array, action: Array) -> Evaluation:
    """`logits` [*lead, classes], `action` [*lead]."""
    xp = library(logits)
    classes = row_numbers(logits.reshape(-1, logits.shape[-1])[0])
    taken = flags(action[..., None] == classes)
    logits = logits - xp.amax(logits, -1, keepdims=True)
    log_probs = logits - xp.log(xp.exp(logits).sum(-1, keepdims=True))
    probs = xp.exp(log_probs)
    entropy = -(probs * log_probs).sum(-1)

    def backward(slope: Array, by_entropy: float) -> Array:
        by_logits = slope[..., None] * (taken - probs)
        if by_entropy:
            by_logits = by_logits - by_entropy * probs * (log_probs + entropy[..., None])
        return by_logits

    return Evaluation((log_probs * taken).sum(-1), entropy, backward)


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

    def forward(self, features: Array) -> Array:
        """[*lead, features] → [*lead]"""
        return self.head.forward(features)[..., 0]

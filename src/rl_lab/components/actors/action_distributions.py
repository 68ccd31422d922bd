"""Distributions over actions as they are stored: classes as integers, continuous actions as they were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_lab.nn.normals import HALF_LOG_TWO_PI


@runtime_checkable
class ActionDistribution(Protocol):
    """π(·|s) for a batch of states; actions are [*lead, *action shape], log-probabilities and entropies [*lead]."""

    def log_prob(self, action: Tensor) -> Tensor: ...

    def entropy(self) -> Tensor: ...

    def sample(self) -> Tensor: ...

    def mode(self) -> Tensor: ...


class Categoricals:
    """Independent categorical choices, one for each entry of `classes`; their logits lie end to end."""

    def __init__(self, logits: Float[Tensor, "*lead logits"], classes: Sequence[int]) -> None:
        parts = [logits] if len(classes) == 1 else logits.split(list(classes), -1)
        self.log_probs = [part.log_softmax(-1) for part in parts]

    def log_prob(self, action: Int[Tensor, "*lead choices"]) -> Float[Tensor, "*lead"]:
        index = action.long()
        taken = [part.gather(-1, index[..., i : i + 1]) for i, part in enumerate(self.log_probs)]
        return (taken[0] if len(taken) == 1 else torch.cat(taken, -1)).sum(-1)

    def entropy(self) -> Float[Tensor, "*lead"]:
        parts = [(part.exp() * part).sum(-1) for part in self.log_probs]
        return -(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))

    def sample(self) -> Int[Tensor, "*lead choices"]:
        # The maximum of log-probabilities minus log of exponential noise falls on class k with probability p_k.
        scores = [part - torch.empty_like(part).exponential_().log_() for part in self.log_probs]
        return torch.stack([part.argmax(-1) for part in scores], -1)

    def mode(self) -> Int[Tensor, "*lead choices"]:
        return torch.stack([part.argmax(-1) for part in self.log_probs], -1)


class DiagonalNormal:
    """A normal with the given mean and the logarithm of its deviation; actions have the shape `shape`."""

    def __init__(
        self, mean: Float[Tensor, "*lead size"], log_std: Float[Tensor, " size"], shape: Sequence[int]
    ) -> None:
        self.mean, self.log_std, self.shape = mean, log_std, tuple(shape)

    def log_prob(self, action: Float[Tensor, ...]) -> Float[Tensor, "*lead"]:
        scaled = (action.reshape(self.mean.shape) - self.mean) * torch.exp(-self.log_std)
        return -0.5 * scaled.square().sum(-1) - (self.log_std + HALF_LOG_TWO_PI).sum()

    def entropy(self) -> Float[Tensor, "*lead"]:
        return (self.log_std + (0.5 + HALF_LOG_TWO_PI)).sum().expand(self.mean.shape[:-1])

    def sample(self) -> Float[Tensor, ...]:
        return self._shaped(torch.addcmul(self.mean, torch.exp(self.log_std), torch.randn_like(self.mean)))

    def mode(self) -> Float[Tensor, ...]:
        return self._shaped(self.mean)

    def _shaped(self, action: Tensor) -> Tensor:
        return action.reshape(*action.shape[:-1], *self.shape)

"""Encoded actions as planners search them: continuous entries, then one-hots, in one vector.

A search distribution is a mean and a deviation for each entry; the mean of a one-hot is its classes' probabilities. So
sampling and refitting are the same few lines for continuous, discrete and mixed actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.spaces import action_spec
from rl_lab.nn.distributions import one_hot
from rl_lab.specs import ActionSpec

PROBABILITY_MARGIN = 1e-6  # keeps log(probability) finite


@dataclass(frozen=True)
class ActionLayout:
    """The first `continuous` entries are in [-1, 1]; a one-hot for each entry of `classes` follows."""

    continuous: int = 0
    classes: tuple[int, ...] = ()

    @classmethod
    def of(cls, action: ActionLayout | ActionSpec | Mapping[str, Any]) -> ActionLayout:
        """The layout of an action space, as `ActionCodec` encodes it."""
        if isinstance(action, ActionLayout):
            return action
        spec = action_spec(action)
        return cls(0, spec.classes) if spec.kind == "discrete" else cls(spec.encoded_size)

    @property
    def size(self) -> int:
        return self.continuous + sum(self.classes)

    def neutral(self) -> Float[Tensor, " action"]:
        """The mean before anything is known: 0, and equal probabilities."""
        parts = [torch.zeros(self.continuous), *(torch.full((count,), 1.0 / count) for count in self.classes)]
        return torch.cat(parts)

    def valid(self, scores: Float[Tensor, "*lead action"]) -> Float[Tensor, "*lead action"]:
        """The nearest valid actions: clipped to the box, and the one-hot of each highest score."""
        if not self.classes:
            return scores.clamp(-1.0, 1.0)
        parts = [scores[..., : self.continuous].clamp(-1.0, 1.0)] if self.continuous else []
        for group in scores[..., self.continuous :].split(self.classes, -1):
            parts.append(one_hot(group.argmax(-1), group.shape[-1], scores.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def sample(
        self,
        mean: Float[Tensor, "*lead action"],
        std: Float[Tensor, "*lead action"],
        noise: Float[Tensor, "*lead action"],
    ) -> Float[Tensor, "*lead action"]:
        """Actions from standard normal `noise`: clipped normals, and classes by their probabilities."""
        scores = mean + std * noise
        if self.classes:
            # The largest of log p + Gumbel noise falls on class k with probability p_k.
            share = torch.special.ndtr(noise[..., self.continuous :]).clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
            logits = mean[..., self.continuous :].clamp(min=PROBABILITY_MARGIN).log() - (-share.log()).log()
            scores = torch.cat([scores[..., : self.continuous], logits], -1)
        return self.valid(scores)

    def uniform(self, noise: Float[Tensor, "*lead action"]) -> Float[Tensor, "*lead action"]:
        """Uniform actions from standard normal `noise`."""
        box = 2.0 * torch.special.ndtr(noise[..., : self.continuous]) - 1.0
        return self.valid(torch.cat([box, noise[..., self.continuous :]], -1))

    def keep_possible(self, mean: Float[Tensor, "*lead action"], floor: float) -> Float[Tensor, "*lead action"]:
        """Mix a share `floor` of equal probabilities into every one-hot's mean, so that no class is lost for good."""
        if not self.classes:
            return mean
        parts = [mean[..., : self.continuous]]
        for group in mean[..., self.continuous :].split(self.classes, -1):
            parts.append((1.0 - floor) * group + floor / group.shape[-1])
        return torch.cat(parts, -1)

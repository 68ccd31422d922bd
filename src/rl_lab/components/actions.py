"""Actions as models see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_lab.components.spaces import action_spec
from rl_lab.nn.distributions import one_hot
from rl_lab.specs import ActionSpec


def mask_illegal(
    scores: Float[Tensor, "*lead classes"], observation: Mapping[str, Tensor], action: ActionSpec
) -> Float[Tensor, "*lead classes"]:
    """Logits or values with the lowest number where the observation's mask forbids the action. Not -inf, which makes
    NaN; and where nothing is legal (a game is over) they stay as they are."""
    if action.mask is None:
        return scores
    legal = observation[action.mask] > 0
    return scores.masked_fill(~legal & legal.any(-1, keepdim=True), torch.finfo(scores.dtype).min)


class ActionCodec:
    """Between stored actions (int32 classes [*lead, components], or float32 [*lead, *shape]) and encoded ones.

    Encoded: float [*lead, encoded_size], concatenated one-hots or the flat continuous vector.
    """

    def __init__(self, action: ActionSpec | Mapping[str, Any]) -> None:
        self.spec = action_spec(action)
        self.encoded_size = self.spec.encoded_size

    def encode(self, action: Shaped[Tensor, "*stored"]) -> Float[Tensor, "*lead size"]:
        if self.spec.kind == "continuous":
            lead = action.shape[: action.ndim - len(self.spec.shape)]
            return action.to(torch.float32).reshape(*lead, self.encoded_size)
        parts = [one_hot(part, size) for part, size in zip(action.unbind(-1), self.spec.classes, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def decode(self, encoded: Float[Tensor, "*lead size"]) -> Shaped[Tensor, "*stored"]:
        """The stored form: class numbers of one-hots; continuous values as they are (environments clip them)."""
        if self.spec.kind == "continuous":
            return encoded.to(torch.float32).reshape(*encoded.shape[:-1], *self.spec.shape)
        parts = [part.argmax(-1) for part in encoded.split(list(self.spec.classes), -1)]
        return torch.stack(parts, -1).to(torch.int32)

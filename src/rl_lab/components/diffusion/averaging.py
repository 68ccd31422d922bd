"""The moving average of a model's weights that Diffusion Policy acts with."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from rl_lab.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)


class AveragedModel(nn.Module, Generic[Model]):
    """A copy of a model whose weights are a moving average of its own: average ← decay·average + (1 - decay)·weights.

    The decay of update n is 1 - (n - 1)^-power, at most `max_decay`: young averages soon forget the first weights. The
    copy is saved with the model; it is neither optimised nor counted.
    """

    updates: Tensor

    def __init__(self, model: Model, *, power: float = 0.75, max_decay: float = 0.9999) -> None:
        super().__init__()
        if power <= 0.0 or not 0.0 <= max_decay < 1.0:
            raise ConfigError(f"power={power}, max_decay={max_decay}: expected power > 0 and max_decay from 0 below 1.")
        self.power, self.max_decay = power, max_decay
        self.model: Model = copy.deepcopy(model).requires_grad_(False).eval()
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def decay(self, update: int) -> float:
        """Of the update with this number, from 1 on. The first two copy the weights."""
        return min(self.max_decay, 1.0 - max(1, update - 1) ** -self.power)

    @torch.no_grad()
    def update(self, model: Model) -> None:
        """Call once after each optimiser step, with the model that was trained."""
        share = 1.0 - self.decay(int(self.updates.add_(1)))
        average: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(average, weights, share)
        for own, other in zip(self.model.buffers(), model.buffers(), strict=True):
            own.copy_(other)

    def train(self, mode: bool = True) -> AveragedModel[Model]:
        """It is never trained: dropout stays off."""
        return super().train(False)

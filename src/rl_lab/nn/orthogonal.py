"""Plain layers with orthogonal weights, as policy-gradient methods use them: gain √2 inside, biases at 0."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

from rl_lab.nn.plain_mlp import PlainMLP

HIDDEN_GAIN = math.sqrt(2.0)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal_(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """Fill a layer in place."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class OrthogonalHead(PlainMLP):
    """`layers` times Linear → activation, then a linear output with its own gain. `gain=None`: torch's own weights."""

    def __init__(
        self, in_features: int, outputs: int, *, units: int, layers: int, activation: str, gain: float | None
    ) -> None:
        super().__init__(in_features, [units] * layers, outputs, activation=activation)
        if gain is not None:
            *hidden, output = (part for part in self if isinstance(part, nn.Linear))
            for layer in hidden:
                orthogonal_(layer)
            orthogonal_(output, gain)

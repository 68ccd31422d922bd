"""Multilayer perceptrons of model-free methods: linear layers and activations, no normalisation."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, TypeVar

from torch import nn

from rl_lab.errors import ConfigError, nearest

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
HIDDEN_GAIN = math.sqrt(2.0)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class PlainMLP(nn.Sequential):
    """`layers` times Linear → activation with `units` outputs each, then a linear output layer.

    With `output_gain` weights are orthogonal, as policy gradients like them: gain √2 in hidden layers, `output_gain`
    in the output layer, biases 0. Without it every layer keeps torch's own initial weights.
    """

    def __init__(
        self,
        in_features: int,
        outputs: int,
        *,
        units: int,
        layers: int,
        activation: str = "relu",
        output_gain: float | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation='{activation}' does not exist.{nearest(activation, ACTIVATIONS)}")
        sizes = [in_features, *[units] * layers]
        parts: list[nn.Module] = []
        for size, following in pairwise(sizes):
            parts += [nn.Linear(size, following), ACTIVATIONS[activation]()]
        output = nn.Linear(sizes[-1], outputs)
        if output_gain is not None:
            for part in parts:
                if isinstance(part, nn.Linear):
                    orthogonal_(part)
            orthogonal_(output, output_gain)
        super().__init__(*parts, output)


def orthogonal_(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """Give a layer orthogonal weights and zero biases, in place; returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer

"""Plain layers with orthogonal weights, as policy-gradient methods use them: gain √2 inside, biases at 0."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

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


def orthogonal_(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """Fill a layer in place."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def make_activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation='{name}' does not exist.{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class OrthogonalHead(nn.Module):
    """`layers` times Linear → activation, then a linear output with its own gain. `gain=None`: torch's own weights."""

    def __init__(
        self, in_features: int, outputs: int, *, units: int, layers: int, activation: str, gain: float | None
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            linear = nn.Linear(in_features, units)
            parts += [linear if gain is None else orthogonal_(linear), make_activation(activation)]
            in_features = units
        output = nn.Linear(in_features, outputs)
        self.net = nn.Sequential(*parts, output if gain is None else orthogonal_(output, gain))

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out"]:
        return self.net(x)

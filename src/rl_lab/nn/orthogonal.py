"""Plain layers with orthogonal weights, as policy-gradient methods use them: gain √2 inside, biases at 0."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import torch
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


class OrthogonalHead(nn.Sequential):
    """`layers` times Linear → activation, then a linear output with its own gain. `gain=None`: torch's own weights."""

    def __init__(
        self, in_features: int, outputs: int, *, units: int, layers: int, activation: str, gain: float | None
    ) -> None:
        parts: list[nn.Module] = []
        for _ in range(layers):
            linear = nn.Linear(in_features, units)
            parts += [linear if gain is None else orthogonal_(linear), make_activation(activation)]
            in_features = units
        output = nn.Linear(in_features, outputs)
        super().__init__(*parts, output if gain is None else orthogonal_(output, gain))
        self._fused = activation == "tanh" and layers > 0
        self._weights = tuple(self.parameters())  # asking a module for them costs more than the layers do

    def forward(self, x: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out"]:
        if not self._fused or x.device.type != "cpu" or x.dtype != torch.float32:
            return super().forward(x)
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        out = TanhMLP.apply(rows, *self._weights) if torch.is_grad_enabled() else _tanh_mlp(rows, *self._weights)[0]
        return out if x.ndim == 2 else out.view(*x.shape[:-1], -1)


def fast_tanh(x: Tensor) -> Tensor:
    """tanh in place, as 2σ(2x) - 1: on a CPU several times faster than torch's own, and exact to a float's last bits."""
    return x.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0)


def _tanh_mlp(x: Tensor, *weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the input of every layer. Weights are weight, bias, weight, bias, …"""
    inputs = [x]
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        inputs.append(fast_tanh(torch.addmm(bias, inputs[-1], weight.t())))
    return torch.addmm(weights[-1], inputs[-1], weights[-2].t()), inputs


class TanhMLP(torch.autograd.Function):
    """Linear → tanh → … → Linear with its own backward pass: on a CPU, small networks cost half of what autograd's do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        out, inputs = _tanh_mlp(x, *weights)
        ctx.save_for_backward(*inputs, *weights[::2])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        count = len(saved) // 2
        slope, found = gradients[0], list[Tensor | None]()
        for layer in reversed(range(count)):
            before, weight = saved[layer], saved[count + layer]
            # The narrow factor comes first: BLAS is several times faster that way round.
            wide = before.shape[1] >= slope.shape[1]
            found += [slope.sum(0), slope.t() @ before if wide else (before.t() @ slope).t()]
            if layer:
                slope = slope @ weight
                slope.addcmul_(slope * before, before, value=-1.0)  # tanh' = 1 - tanh²
        return (slope @ saved[count] if ctx.needs_input_grad[0] else None, *reversed(found))

"""Multilayer perceptrons whose derivative is written out: small networks cost their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.arrays import Array
from rl_lab.nn.host_mlp import HOST_ACTIVATIONS, HostMLP

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
Backward = Callable[..., None]  # takes the derivative by each of the outputs and gives the parameters their gradients


class PlainMLP(nn.Sequential):
    """`hidden` layers of Linear → activation, then a linear output; torch's own initial weights.

    On the CPU NumPy runs it where no graph is wanted; see `HostMLP`.
    """

    def __init__(self, in_features: int, hidden: Sequence[int], outputs: int, *, activation: str = "relu") -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation='{activation}' does not exist.{nearest(activation, ACTIVATIONS)}")
        parts: list[nn.Module] = []
        for sizes in pairwise([in_features, *hidden]):
            parts += [nn.Linear(*sizes), ACTIVATIONS[activation]()]
        super().__init__(*parts, nn.Linear([in_features, *hidden][-1], outputs))
        host = next((name for name in HOST_ACTIVATIONS if name == activation), None)
        self.host = HostMLP(tuple(self.parameters()), host) if host is not None else None

    def forward(self, x: Array) -> Array:
        """[*lead, in_features] → [*lead, outputs]; an array gives an array."""
        if isinstance(x, np.ndarray):
            return self.on_host().forward(x)[0]
        if self.host is None or not _on_host(x) or torch.is_grad_enabled():
            return super().forward(x)
        return torch.from_numpy(self.host.forward(x.numpy())[0])

    def on_host(self) -> HostMLP:
        """What runs arrays through it."""
        if self.host is None:
            raise TypeError(f"NumPy can run a PlainMLP with one of {HOST_ACTIVATIONS}, and no other activation")
        return self.host


def run_heads(x: Array, *heads: PlainMLP) -> tuple[list[Array], Backward]:
    """The outputs of several networks on the same input, without a graph, and the backward pass of all of them.

    On an array it is done without autograd, whose engine costs several times what it computes, and sets the gradients:
    what was there before is overwritten. On a tensor autograd does it, and adds to them.
    """
    if not isinstance(x, np.ndarray):
        with torch.enable_grad():
            outputs = [nn.Sequential.forward(head, x) for head in heads]
        return [out.detach() for out in outputs], lambda *slopes: torch.autograd.backward(outputs, slopes)
    hosts = [head.on_host() for head in heads]
    results = [host.forward(x) for host in hosts]

    def backward(*slopes: np.ndarray) -> None:
        for host, (_, inputs), slope in zip(hosts, results, slopes, strict=True):
            host.backward(slope, inputs)

    return [out for out, _ in results], backward


def _on_host(x: Tensor) -> bool:
    return x.is_cpu and x.ndim == 2 and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")

"""Styles of networks: the norm and the activation between linear layers, and the initialisation, as one algorithm has
them.

A configuration names a style (`style: dreamer_v2`) or spells one out (`style: {norm: layer, activation: mish}`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.errors import ConfigError, nearest

Norm = Literal["rms", "layer", "none"]
Initialization = Literal["fan_in", "fan_avg", "glorot"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "elu": F.elu,
    "relu": F.relu,
    "gelu": F.gelu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "none": lambda x: x,
}
NORM_EPS: dict[str, float] = {"rms": 1e-4, "layer": 1e-3, "none": 0.0}
INITIALIZATIONS = ("fan_in", "fan_avg", "glorot")
CHOICES: dict[str, Collection[str]] = {
    "activation": ACTIVATIONS,
    "norm": NORM_EPS,
    "init": INITIALIZATIONS,
    "output_init": INITIALIZATIONS,
}


@dataclass(frozen=True)
class LayerStyle:
    """One hidden layer is Linear → norm → activation. The defaults are DreamerV3's."""

    activation: str = "silu"
    norm: Norm = "rms"
    eps: float | None = None  # null: 1e-4 for rms, 1e-3 for layer
    bias: bool = True  # of linear layers that a norm follows; others always have one
    init: Initialization = "fan_in"  # of hidden layers; see nn.layers
    output_init: Initialization = "fan_in"  # of output layers

    @property
    def activate(self) -> Callable[[Tensor], Tensor]:
        return ACTIVATIONS[self.activation]

    @property
    def norm_eps(self) -> float:
        return NORM_EPS[self.norm] if self.eps is None else self.eps

    @property
    def hidden_bias(self) -> bool:
        """Whether a hidden layer's linear part has a bias."""
        return self.bias or self.norm == "none"


DREAMER_V3 = LayerStyle()
STYLES: dict[str, LayerStyle] = {
    "dreamer_v3": DREAMER_V3,
    "dreamer_v3_2023": LayerStyle(norm="layer", bias=False, init="fan_avg", output_init="glorot"),
    "dreamer_v2": LayerStyle("elu", norm="none", init="glorot", output_init="glorot"),
    "dreamer_v1": LayerStyle("elu", norm="none", init="glorot", output_init="glorot"),
    "planet": LayerStyle("relu", norm="none", init="glorot", output_init="glorot"),
}

StyleLike = LayerStyle | str | Mapping[str, Any] | None


def layer_style(style: StyleLike) -> LayerStyle:
    """A style by name, by its settings (`like` names the one they start from), or DreamerV3's where there is none."""
    if style is None:
        return DREAMER_V3
    if isinstance(style, LayerStyle):
        return style
    if isinstance(style, str):
        if style not in STYLES:
            raise ConfigError(f"style='{style}' does not exist.{nearest(style, STYLES)}")
        return STYLES[style]
    known = {field.name for field in fields(LayerStyle)}
    settings = dict(style)
    base = layer_style(settings.pop("like", None))
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"style.{name} is not a setting of a layer style.{nearest(str(name), [*known, 'like'])}")
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigError(f"style.{name}='{value}' does not exist.{nearest(str(value), CHOICES[name])}")
    return LayerStyle(**({name: getattr(base, name) for name in known} | settings))

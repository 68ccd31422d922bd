"""The networks of TD-MPC and TD-MPC2: dense layers with their initial weights, alone or several side by side.

TD-MPC2's hidden layer is Linear → LayerNorm → Mish with truncated normal weights of deviation 0.02; TD-MPC's is
Linear → ELU with orthogonal ones. Biases start at 0, and an output layer that is to predict 0 at first has no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.distributions import at_least_float32
from rl_lab.nn.member_mlp import MemberLinear

Style = Literal["tdmpc", "tdmpc2"]
WEIGHT_STD = 0.02
STEEP = 20.0  # above it mish(x) is x
NORM_EPS = 1e-5


class Mish(nn.Module):
    """x·tanh(softplus(x)), as x·n / (n + 2) with n = e^x (e^x + 2): on a CPU much faster than torch's own."""

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        growth = at_least_float32(x).clamp(max=STEEP).exp()
        growth = growth * (growth + 2.0)
        return (x * (growth / (growth + 2.0))).to(x.dtype)


class SimNorm(nn.Module):
    """A softmax within every `group` entries, which makes each group a point of a simplex."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        return x.unflatten(-1, (-1, self.group)).softmax(-1).flatten(-2)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"mish": Mish, "elu": nn.ELU, "tanh": nn.Tanh}


class HiddenLayer(NamedTuple):
    units: int
    norm: bool
    activation: str


def hidden_layers(style: str, units: int, layers: int) -> list[HiddenLayer]:
    """The hidden layers of a network of TD-MPC or TD-MPC2."""
    if style == "tdmpc2":
        return [HiddenLayer(units, True, "mish")] * layers
    if style == "tdmpc":
        return [HiddenLayer(units, False, "elu")] * layers
    raise ConfigError(f"style='{style}' does not exist.{nearest(style, ['tdmpc', 'tdmpc2'])}")


def value_layers(style: str, units: int, layers: int) -> list[HiddenLayer]:
    """The same for action values: TD-MPC has a LayerNorm and tanh in their first layer."""
    own = hidden_layers(style, units, layers)
    return [HiddenLayer(units, True, "tanh"), *own[1:]] if style == "tdmpc" and own else own


@torch.no_grad()
def init_weight_(weight: Tensor, style: str, *, zero: bool = False) -> None:
    """Set the initial weights of one layer or several side by side, [*members, inputs, outputs] or its transpose."""
    if zero:
        weight.zero_()
    elif style == "tdmpc2":
        nn.init.trunc_normal_(weight, std=WEIGHT_STD)
    else:
        for member in weight.view(-1, *weight.shape[-2:]):
            nn.init.orthogonal_(member)


def linear(inputs: int, outputs: int, *, style: str, zero: bool = False) -> nn.Linear:
    """A dense layer with the initial weights of its algorithm."""
    layer = nn.Linear(inputs, outputs)
    init_weight_(layer.weight, style, zero=zero)
    nn.init.zeros_(layer.bias)
    return layer


class TDMPCLayer(nn.Module):
    """Linear → LayerNorm (where `norm`) → activation."""

    def __init__(self, inputs: int, outputs: int, *, norm: bool, activation: nn.Module, style: str) -> None:
        super().__init__()
        self.linear = linear(inputs, outputs, style=style)
        self.norm = nn.LayerNorm(outputs, eps=NORM_EPS) if norm else nn.Identity()
        self.activation = activation

    def forward(self, x: Float[Tensor, "*lead inputs"]) -> Float[Tensor, "*lead outputs"]:
        return self.activation(self.norm(self.linear(x)))


class TDMPCMLP(nn.Sequential):
    """Hidden layers, then a linear output, or with `simplex` Linear → LayerNorm → SimNorm with groups of that size."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[HiddenLayer],
        outputs: int,
        *,
        style: str,
        simplex: int | None = None,
        zero_output: bool = False,
    ) -> None:
        layers: list[nn.Module] = []
        for units, norm, activation in hidden:
            layers.append(TDMPCLayer(inputs, units, norm=norm, activation=ACTIVATIONS[activation](), style=style))
            inputs = units
        if simplex is None:
            layers.append(linear(inputs, outputs, style=style, zero=zero_output))
        else:
            layers.append(simplex_layer(inputs, outputs, simplex, style=style))
        super().__init__(*layers)
        self.output_size = outputs


def simplex_layer(inputs: int, outputs: int, group: int, *, style: str) -> TDMPCLayer:
    """Linear → LayerNorm → SimNorm."""
    check_simplex(outputs, group)
    return TDMPCLayer(inputs, outputs, norm=True, activation=SimNorm(group), style=style)


def check_simplex(size: int, group: int) -> None:
    if group < 1 or size % group:
        raise ConfigError(
            f"A latent of {size} entries cannot be cut into simplices of {group}: choose a size that is a multiple of "
            f"{group}, or another simplex."
        )


class MemberNorm(nn.Module):
    """A LayerNorm for each member."""

    full_precision = True  # in a copy whose other weights are 16-bit

    def __init__(self, members: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, units))
        self.bias = nn.Parameter(torch.zeros(members, 1, units))

    def forward(
        self, x: Float[Tensor, "chosen rows units"], members: Int[Tensor, " chosen"] | None, *, frozen: bool
    ) -> Float[Tensor, "chosen rows units"]:
        weight, bias = (self.weight.detach(), self.bias.detach()) if frozen else (self.weight, self.bias)
        if members is not None:
            weight, bias = weight[members], bias[members]
        return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), weight)


class EnsembleLayer(nn.Module):
    """`members` dense layers side by side, as one batched product; with a LayerNorm of each member's own."""

    def __init__(
        self, members: int, inputs: int, outputs: int, *, norm: bool, activation: nn.Module, style: str, zero: bool
    ) -> None:
        super().__init__()
        self.linear = MemberLinear(members, inputs, outputs)
        init_weight_(self.linear.weight, style, zero=zero)
        self.norm = MemberNorm(members, outputs) if norm else None
        self.activation = activation

    def forward(
        self,
        x: Float[Tensor, "chosen rows inputs"],
        *,
        keep: Float[Tensor, "chosen rows outputs"] | None = None,
        members: Int[Tensor, " chosen"] | None = None,
        frozen: bool = False,
    ) -> Float[Tensor, "chosen rows outputs"]:
        """Each member on its own rows. `keep` is a dropout mask, already divided by the share that is kept; `members`
        and `frozen` as for the linear layer."""
        x = self.linear(x, members, frozen=frozen)
        if keep is not None:
            x = x * keep
        if self.norm is not None:
            x = self.norm(x, members, frozen=frozen)
        return self.activation(x)


class EnsembleMLP(nn.Module):
    """`members` networks of one shape on the same input. Without `outputs` it ends with the last hidden layer."""

    def __init__(
        self,
        members: int,
        inputs: int,
        hidden: Sequence[HiddenLayer],
        outputs: int | None = None,
        *,
        style: str,
        zero_output: bool = False,
    ) -> None:
        super().__init__()
        self.members = members
        self.layers = nn.ModuleList()
        for units, norm, activation in hidden:
            self.layers.append(
                EnsembleLayer(
                    members, inputs, units, norm=norm, activation=ACTIVATIONS[activation](), style=style, zero=False
                )
            )
            inputs = units
        if outputs is not None:
            self.layers.append(
                EnsembleLayer(
                    members, inputs, outputs, norm=False, activation=nn.Identity(), style=style, zero=zero_output
                )
            )

    def forward(
        self,
        x: Float[Tensor, "rows inputs"],
        *,
        keep: Float[Tensor, "chosen rows units"] | None = None,
        members: Int[Tensor, " chosen"] | None = None,
        frozen: bool = False,
    ) -> Float[Tensor, "chosen rows outputs"]:
        """All members, or those with the numbers `members`; dropout (`keep`) is in the first layer alone."""
        count = self.members if members is None else members.shape[0]
        x = x.expand(count, *x.shape)
        for place, layer in enumerate(self.layers):
            x = layer(x, keep=keep if place == 0 else None, members=members, frozen=frozen)
        return x

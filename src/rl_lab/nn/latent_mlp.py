"""The networks of TD-MPC and TD-MPC2: dense layers with their initial weights, alone or as many side by side.

TD-MPC2's hidden layer is Linear → LayerNorm → Mish with truncated normal weights of deviation 0.02; TD-MPC's is
Linear → ELU with orthogonal ones. Biases start at 0, and an output layer that is to predict 0 at first has no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_lab.errors import ConfigError, nearest
from rl_lab.nn.fusion import has_triton, uses_kernels
from rl_lab.nn.member_mlp import MemberLinear

Style = Literal["tdmpc", "tdmpc2"]
WEIGHT_STD = 0.02
STEEP = 20.0  # above it mish(x) is x
NORM_EPS = 1e-5  # torch's own


class HostMish(torch.autograd.Function):
    """x·tanh(softplus(x)) as x·n / (n + 1) with n = e^x + e^2x / 2: on a CPU much faster than torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = HostMish.share(x)
        ctx.save_for_backward(x, share)
        return x * share

    @staticmethod
    def share(x: Tensor) -> Tensor:
        growth = x.clamp(max=STEEP).exp_()
        half = torch.addcmul(growth, growth, growth, value=0.5)
        return torch.div(half, half + 1.0, out=half)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, share = ctx.saved_tensors
        slope = (1.0 - share.square()).mul_(x).mul_(torch.sigmoid(x)).add_(share)
        return slope.mul_(gradients[0])


def mish(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.mish(x)
    return HostMish.apply(x) if torch.is_grad_enabled() and x.requires_grad else HostMish.share(x).mul_(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"mish": mish, "elu": F.elu, "tanh": torch.tanh}


class HiddenLayer(NamedTuple):
    units: int
    norm: bool
    activation: str


def hidden_layers(style: str, units: int, layers: int) -> list[HiddenLayer]:
    """As the algorithm of that name has them."""
    if style == "tdmpc2":
        return [HiddenLayer(units, True, "mish")] * layers
    if style == "tdmpc":
        return [HiddenLayer(units, False, "elu")] * layers
    raise ConfigError(f"style='{style}' does not exist.{nearest(style, ['tdmpc', 'tdmpc2'])}")


def value_layers(style: str, units: int, layers: int) -> list[HiddenLayer]:
    """The same for action values: TD-MPC has a LayerNorm and tanh in their first layer."""
    own = hidden_layers(style, units, layers)
    return [HiddenLayer(units, True, "tanh"), *own[1:]] if style == "tdmpc" and own else own


def sim_norm(x: Float[Tensor, "*lead size"], group: int) -> Float[Tensor, "*lead size"]:
    """SimNorm: a softmax within every `group` entries, so that they are a point of a simplex."""
    return x.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)


@torch.no_grad()
def init_weight_(weight: Tensor, style: str, *, zero: bool = False) -> None:
    """Of one layer, or of many side by side; [*members, inputs, outputs] or its transpose."""
    if zero:
        weight.zero_()
    elif style == "tdmpc2":
        nn.init.trunc_normal_(weight, std=WEIGHT_STD)
    else:
        for member in weight.view(-1, *weight.shape[-2:]):
            nn.init.orthogonal_(member)


class LatentMLP(nn.Module):
    """Hidden layers, then a linear output; or, with `simplex`, Linear → LayerNorm → SimNorm of such groups."""

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
        super().__init__()
        sizes = [inputs, *(layer.units for layer in hidden), outputs]
        self.linears = nn.ModuleList(nn.Linear(left, right) for left, right in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(layer.units) if layer.norm else nn.Identity() for layer in hidden)
        self.output_norm = nn.Identity() if simplex is None else nn.LayerNorm(outputs)
        self.activations, self.simplex, self.output_size = [layer.activation for layer in hidden], simplex, outputs
        if simplex is not None:
            check_simplex(outputs, simplex)
        for place, linear in enumerate(self.linears):
            assert isinstance(linear, nn.Linear)
            init_weight_(linear.weight, style, zero=zero_output and place == len(hidden))
            nn.init.zeros_(linear.bias)
        self._fusable = all(layer.norm and layer.activation == "mish" for layer in hidden)
        self.fused = False

    def fuse(self) -> bool:
        """Run the hidden layers on a kernel of our own from now on, where no gradient is asked for."""
        self.fused = self._fusable and has_triton(next(self.parameters()))
        return self.fused

    def forward(self, x: Float[Tensor, "*lead inputs"]) -> Float[Tensor, "*lead outputs"]:
        for linear, norm, activation in zip(self.linears, self.norms, self.activations, strict=False):
            x = linear(x)
            x = fused_norm_mish(x, norm) if uses_kernels(self.fused) else ACTIVATIONS[activation](norm(x))
        x = self.linears[-1](x)
        return x if self.simplex is None else sim_norm(self.output_norm(x), self.simplex)


def check_simplex(size: int, group: int) -> None:
    if group < 1 or size % group:
        raise ConfigError(
            f"A latent of {size} entries cannot be cut into simplices of {group}: choose a size that is a multiple of "
            f"{group}, or another simplex."
        )


def fused_norm_mish(x: Float[Tensor, "*lead units"], norm: nn.Module) -> Float[Tensor, "*lead units"]:
    """LayerNorm and Mish as one kernel."""
    from rl_lab.nn.latent_kernels import norm_mish

    assert isinstance(norm, nn.LayerNorm)
    return norm_mish(x.reshape(1, -1, x.shape[-1]), norm.weight, norm.bias, eps=norm.eps).view(x.shape)


def fused_norm_simplex(
    x: Float[Tensor, "rows size"], norm: nn.Module, group: int, *, width: int
) -> Float[Tensor, "rows size"]:
    """LayerNorm and SimNorm as one kernel; the rows have room up to `width`."""
    from rl_lab.nn.latent_kernels import norm_simplex

    assert isinstance(norm, nn.LayerNorm)
    return norm_simplex(x, norm.weight, norm.bias, eps=norm.eps, group=group, width=width)


class EnsembleLayer(nn.Module):
    """`members` dense layers side by side, as one batched product; with a LayerNorm of each member's own."""

    def __init__(
        self, members: int, inputs: int, outputs: int, *, norm: bool, activation: str | None, style: str, zero: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.linear = MemberLinear(members, inputs, outputs)
        init_weight_(self.linear.weight, style, zero=zero)
        self.scale = nn.Parameter(torch.ones(members, 1, outputs)) if norm else None
        self.shift = nn.Parameter(torch.zeros(members, 1, outputs)) if norm else None
        self.fused = False

    def fuse(self) -> bool:
        """Run norm and activation on a kernel of our own from now on, where no gradient is asked for."""
        self.fused = self.scale is not None and self.activation == "mish" and has_triton(self.scale)
        return self.fused

    def forward(
        self,
        x: Float[Tensor, "chosen rows inputs"],
        *,
        keep: Float[Tensor, "chosen rows outputs"] | None = None,
        members: Int[Tensor, " chosen"] | None = None,
        frozen: bool = False,
    ) -> Float[Tensor, "chosen rows outputs"]:
        """Each member on its own rows. `keep` multiplies what is dropped out by 0, and what is not by what makes up for
        it; `members` and `frozen` as for the linear layer."""
        if uses_kernels(self.fused) and keep is None:
            return self._forward_fused(x, members)
        x = self.linear(x, members, frozen=frozen)
        if keep is not None:
            x = x * keep
        if self.scale is not None and self.shift is not None:
            scale, shift = (self.scale.detach(), self.shift.detach()) if frozen else (self.scale, self.shift)
            if members is not None:
                scale, shift = scale[members], shift[members]
            x = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), scale)
        return x if self.activation is None else ACTIVATIONS[self.activation](x)

    def _forward_fused(self, x: Tensor, members: Tensor | None) -> Tensor:
        """The kernel adds the bias: the product would read all its results for it. Rows stay as wide as the weights."""
        from rl_lab.nn.latent_kernels import norm_mish

        assert self.scale is not None
        assert self.shift is not None
        weight = self.linear.weight if members is None else self.linear.weight[members]
        if weight.shape[1] > x.shape[-1]:
            x = F.pad(x, (0, weight.shape[1] - x.shape[-1]))
        x = torch.bmm(x, weight)
        return norm_mish(x, self.scale, self.shift, eps=NORM_EPS, bias=self.linear.bias, members=members)


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
                EnsembleLayer(members, inputs, units, norm=norm, activation=activation, style=style, zero=False)
            )
            inputs = units
        if outputs is not None:
            self.layers.append(
                EnsembleLayer(members, inputs, outputs, norm=False, activation=None, style=style, zero=zero_output)
            )
        self.hidden, self.fused = len(hidden), False

    @property
    def width(self) -> int:
        """Of the inputs as the first product takes them: a padded copy has wider ones."""
        first = self.layers[0]
        assert isinstance(first, EnsembleLayer)
        return first.linear.weight.shape[1]

    def fuse(self) -> bool:
        """Run the hidden layers on a kernel of our own from now on, where no gradient is asked for."""
        self.fused = all(isinstance(layer, EnsembleLayer) and layer.fuse() for layer in self.layers[: self.hidden])
        return self.fused

    def join(
        self, latent: Float[Tensor, "rows latent"], action: Float[Tensor, "rows action"]
    ) -> Float[Tensor, "rows inputs"]:
        """The input for a latent and an action. In a plan a latent has room for the action behind it."""
        rows, size = latent.shape
        if not uses_kernels(self.fused) or latent.stride() != (self.width, 1) or size == self.width:
            return torch.cat([latent, action.to(latent.dtype)], -1)
        inputs = latent.as_strided((rows, self.width), (self.width, 1))
        inputs[:, size : size + action.shape[-1]] = action
        return inputs

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

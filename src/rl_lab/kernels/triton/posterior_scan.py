"""Shapes and pieces of the block RSSM's scan over a sequence, whose backward pass is written by hand.

All that is not recurrent is done outside the loop (the action's and the observation's part of the layers, all noise).
The backward loop carries gradients of activations alone, and each weight's gradient is one product over all steps.

Symbols: T time, B batch, D deter, G blocks, d = D/G, U hidden, Z = groups × classes. Everything here is time-major.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-4


class ScanWeights(NamedTuple):
    """The recurrent weights, laid out for `x @ weight`."""

    block: Tensor  # [G, d, d] deter → core, block by block
    dense: Tensor  # [D, 2U] deter → (posterior layer | deter layer)
    stoch: Tensor  # [Z, U]
    inputs: Tensor  # [2U, D] (deter layer | stoch layer) → core, shared by all blocks
    gates: Tensor  # [G, d, 3d]
    gates_bias: Tensor  # [3D] block by block
    logits: Tensor  # [U, Z]
    logits_bias: Tensor  # [Z]
    inputs_bias: Tensor  # [2U] (deter layer | stoch layer)
    inputs_norm: Tensor  # [2U]
    core_norm: Tensor  # [D]
    posterior_norm: Tensor  # [U]


class ScanShape(NamedTuple):
    """Sizes that the steps need as plain numbers."""

    blocks: int
    groups: int
    classes: int
    unimix: float


class ScanInputs(NamedTuple):
    """Inputs that do not depend on the recurrence, and the state before the first step."""

    deter: Tensor  # [B, D]
    stoch: Tensor  # [B, Z]
    keep: Tensor  # [T, B, 1] 0 where an episode starts
    action_part: Tensor  # [T, B, D] of the core layer
    embed_part: Tensor  # [T, B, U] of the posterior layer
    noise: Tensor  # [T, B, groups, classes]


class Path(NamedTuple):
    """Activations of the forward loop, stacked over time (of one step: without the T)."""

    deter: Tensor  # [T, B, D]
    stoch: Tensor  # [T, B, Z]
    logits: Tensor  # [T, B, Z]
    inputs_pre: Tensor  # [T, B, 2U] the deter and the stoch layer before their norms
    core_pre: Tensor  # [T, B, D]
    gates: Tensor  # [T, B, 3D] block by block: (reset | candidate | update)
    posterior_pre: Tensor  # [T, B, U]


class PathGradients(NamedTuple):
    """Gradients from the backward loop by the layers' outputs, after norm and activation if there are any."""

    logits: Tensor  # [T, B, Z]
    posterior: Tensor  # [T, B, U]
    gates: Tensor  # [T, B, 3D]
    core: Tensor  # [T, B, D]
    inputs: Tensor  # [T, B, 2U]


# Pieces of a layer ----------------------------------------------------------------------------------------------------


def norm_silu(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return F.silu(F.rms_norm(x, weight.shape, weight, NORM_EPS))


def norm_silu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_silu` for its input and, per row, for its weight."""
    x, grad = x.float(), grad.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
    normed = x * scale
    grad_scaled = torch.ops.aten.silu_backward(grad, normed * weight)
    grad_normed = grad_scaled * weight
    grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    return grad_x, grad_scaled * normed


def norm_tables(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(slope, drag): the gradient through norm_silu is slope·grad - mean(slope·grad·x)·drag."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
    y = x * scale * weight
    gate = torch.sigmoid(y)
    return scale * weight * gate * (1 + y * (1 - gate)), x * scale.square()


def halves(function: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Any]:
    """Apply a function to the deter layer's half and to the stoch layer's half."""
    left, right = zip(*(tensor.chunk(2, -1) for tensor in tensors), strict=True)
    return function(*left), function(*right)


def with_first(first: Tensor, following: Tensor) -> Tensor:
    """The value before each step: `first`, then all of `following` but its last."""
    return torch.cat([first.unsqueeze(0), following[:-1]])


def weight_gradients(
    inputs: ScanInputs, path: Path, gradients: PathGradients, weights: ScanWeights, shape: ScanShape
) -> tuple[Tensor, Tensor, ScanWeights]:
    """Gradients by the action's part, the embedding's part and every weight, each one product over all T·B rows."""
    dtype = weights.stoch.dtype

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def block_rows(x: Tensor) -> Tensor:  # [T, B, G·n] → [G, T·B, n]
        return rows(x).unflatten(-1, (shape.blocks, -1)).transpose(0, 1)

    keep = inputs.keep.to(dtype)
    before, stoch_before = with_first(inputs.deter, path.deter) * keep, with_first(inputs.stoch, path.stoch) * keep
    posterior_pre, posterior_norm = norm_silu_backward(gradients.posterior, path.posterior_pre, weights.posterior_norm)
    core_pre, core_norm = norm_silu_backward(gradients.core, path.core_pre, weights.core_norm)
    by_half = halves(norm_silu_backward, gradients.inputs, path.inputs_pre, weights.inputs_norm)
    inputs_pre, inputs_norm = (torch.cat(parts, -1) for parts in zip(*by_half, strict=True))
    posterior_pre, core_pre, layers_pre = posterior_pre.to(dtype), core_pre.to(dtype), inputs_pre.to(dtype)
    deter_pre, stoch_pre = layers_pre.chunk(2, -1)
    layer_inputs = torch.cat(halves(norm_silu, path.inputs_pre, weights.inputs_norm), -1).to(dtype)
    core = norm_silu(path.core_pre, weights.core_norm).to(dtype)
    posterior = norm_silu(path.posterior_pre, weights.posterior_norm).to(dtype)
    by_weight = ScanWeights(
        block=torch.bmm(block_rows(before).transpose(1, 2), block_rows(core_pre)),
        dense=torch.cat([rows(path.deter).t() @ rows(posterior_pre), rows(before).t() @ rows(deter_pre)], -1),
        stoch=rows(stoch_before).t() @ rows(stoch_pre),
        inputs=rows(layer_inputs).t() @ rows(core_pre),
        gates=torch.bmm(block_rows(core).transpose(1, 2), block_rows(gradients.gates)),
        gates_bias=rows(gradients.gates).sum(0),
        logits=rows(posterior).t() @ rows(gradients.logits),
        logits_bias=rows(gradients.logits).sum(0),
        inputs_bias=rows(inputs_pre).sum(0),
        inputs_norm=rows(inputs_norm).sum(0),
        core_norm=rows(core_norm).sum(0),
        posterior_norm=rows(posterior_norm).sum(0),
    )
    by_weight = ScanWeights(*(grad.to(weight.dtype) for grad, weight in zip(by_weight, weights, strict=True)))
    return core_pre, posterior_pre, by_weight

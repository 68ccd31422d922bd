"""The recurrence of the block RSSM over a whole sequence, with a backward pass written by hand.

An update spends most of its time in the steps that cannot run side by side. So everything that is not recurrent is
done outside the loop (the action's and the observation's part of the layers, all noise), and the loop is one autograd
function: its backward loop carries activation gradients only, and each weight gradient is one product over all steps at
the end. `BlockRSSM.observe_step` is the same recurrence in plain form; the tests hold the two together.

Symbols: T time, B batch, D deter, G blocks, d = D/G, U hidden, Z = groups × classes. Everything here is time-major.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.nn.math import at_least_float32

NORM_EPS = 1e-4


class ScanWeights(NamedTuple):
    """The recurrent weights, laid out for `x @ weight`."""

    block: Tensor  # [G, d, d] deter → core, block by block
    dense: Tensor  # [D, 2U] deter → (posterior layer | deter layer)
    stoch: Tensor  # [Z, U]
    inputs: Tensor  # [2U, D] (deter layer | stoch layer) → core, shared by all blocks
    gates: Tensor  # [G, d, 3d]
    gates_bias: Tensor  # [G, 1, 3d]
    logits: Tensor  # [U, Z]
    logits_bias: Tensor  # [Z]
    deter_bias: Tensor  # [U]
    stoch_bias: Tensor  # [U]
    deter_norm: Tensor  # [U]
    stoch_norm: Tensor  # [U]
    core_norm: Tensor  # [D]
    posterior_norm: Tensor  # [U]


class ScanShape(NamedTuple):
    """Sizes that the steps need as plain numbers."""

    blocks: int
    groups: int
    classes: int
    unimix: float


class Saved(NamedTuple):
    """What one forward step leaves for its backward step."""

    deter_pre: Tensor  # [B, U]
    stoch_pre: Tensor  # [B, U]
    inputs: Tensor  # [B, 2U]
    core_pre: Tensor  # [B, D]
    core: Tensor  # [B, D]
    gates: Tensor  # [G, B, 3d]
    posterior_pre: Tensor  # [B, U]
    posterior: Tensor  # [B, U]


class Gradients(NamedTuple):
    """What one backward step leaves for the weight gradients."""

    logits: Tensor  # [B, Z]
    posterior: Tensor  # [B, U]
    posterior_pre: Tensor  # [B, U]
    gates: Tensor  # [G, B, 3d]
    core: Tensor  # [B, D]
    core_pre: Tensor  # [B, D]
    inputs: Tensor  # [B, 2U]
    deter_pre: Tensor  # [B, U]
    stoch_pre: Tensor  # [B, U]


def to_blocks(x: Tensor, blocks: int) -> Tensor:
    """[B, G·n] → [G, B, n]"""
    return x.view(x.shape[0], blocks, -1).transpose(0, 1)


def from_blocks(x: Tensor) -> Tensor:
    """[G, B, n] → [B, G·n]"""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def norm_silu(x: Tensor, weight: Tensor) -> Tensor:
    x = at_least_float32(x)
    return F.silu(F.rms_norm(x, weight.shape, weight, NORM_EPS))


def norm_silu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_silu` for its input and, per row, for its weight."""
    x, grad = at_least_float32(x), at_least_float32(grad)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
    normed = x * scale
    grad_scaled = torch.ops.aten.silu_backward(grad, normed * weight)
    grad_normed = grad_scaled * weight
    grad_x = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    return grad_x, grad_scaled * normed


def gated_update(gates: Tensor, deter: Tensor) -> Tensor:
    """The block GRU: `update` is the share of new content."""
    reset, candidate, update = (at_least_float32(from_blocks(part)) for part in gates.chunk(3, -1))
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    return torch.lerp(at_least_float32(deter), candidate, torch.sigmoid(update - 1))


def forward_step(
    deter: Tensor,
    stoch: Tensor,
    dense: Tensor,
    keep: Tensor,
    action_part: Tensor,
    embed_part: Tensor,
    noise: Tensor,
    weights: ScanWeights,
    shape: ScanShape,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
    """One posterior step: (deter, stoch, logits, dense product of the new deter, what the backward step needs)."""
    dtype, hidden = weights.stoch.dtype, weights.stoch.shape[1]
    deter_pre = at_least_float32(dense[:, hidden:]) * keep + weights.deter_bias
    stoch_pre = at_least_float32(stoch @ weights.stoch) * keep + weights.stoch_bias
    inputs = torch.cat([norm_silu(deter_pre, weights.deter_norm), norm_silu(stoch_pre, weights.stoch_norm)], -1)
    inputs = inputs.to(dtype)
    deter = deter * keep.to(dtype)
    core_pre = inputs @ weights.inputs + from_blocks(torch.bmm(to_blocks(deter, shape.blocks), weights.block))
    core_pre = core_pre + action_part
    core = norm_silu(core_pre, weights.core_norm).to(dtype)
    gates = torch.baddbmm(weights.gates_bias, to_blocks(core, shape.blocks), weights.gates)
    deter = gated_update(gates, deter).to(dtype)
    dense = deter @ weights.dense
    posterior_pre = dense[:, :hidden] + embed_part
    posterior = norm_silu(posterior_pre, weights.posterior_norm).to(dtype)
    logits = torch.addmm(weights.logits_bias, posterior, weights.logits)
    probs = at_least_float32(logits).unflatten(-1, (shape.groups, shape.classes)).softmax(-1)
    probs = (1 - shape.unimix) * probs + shape.unimix / shape.classes
    choice = (probs / noise).argmax(-1, keepdim=True)
    stoch = (choice == torch.arange(shape.classes, device=choice.device)).flatten(-2).to(dtype)
    saved = Saved(deter_pre, stoch_pre, inputs, core_pre, core, gates, posterior_pre, posterior)
    return deter, stoch, logits, dense, saved


class Carry(NamedTuple):
    """Gradients that reach a step from the one after it, already masked by that step's `keep`."""

    deter_layer: Tensor  # [B, U] of the deter layer's pre-activation
    stoch_layer: Tensor  # [B, U]
    core_pre: Tensor  # [B, D]
    deter: Tensor  # [B, D] straight through the gate


def backward_step(
    carry: Carry,
    grad_deter: Tensor,
    grad_stoch: Tensor,
    grad_logits: Tensor,
    keep: Tensor,
    previous_deter: Tensor,
    logits: Tensor,
    saved: Saved,
    weights: ScanWeights,
    shape: ScanShape,
) -> tuple[Carry, Gradients]:
    """The reverse of `forward_step`; no weight gradients here."""
    dtype, hidden = weights.stoch.dtype, weights.stoch.shape[1]
    # Straight-through sample: the gradient of the one-hot is the gradient of its probabilities.
    grad_sample = at_least_float32(carry.stoch_layer @ weights.stoch.t() + grad_stoch)
    grad_sample = grad_sample.unflatten(-1, (shape.groups, shape.classes))
    probs = at_least_float32(logits).unflatten(-1, (shape.groups, shape.classes)).softmax(-1)
    grad_sample = (1 - shape.unimix) * probs * (grad_sample - (probs * grad_sample).sum(-1, keepdim=True))
    grad_logits = (grad_sample.flatten(-2) + grad_logits).to(dtype)
    grad_posterior = grad_logits @ weights.logits.t()
    posterior_pre = norm_silu_backward(grad_posterior, saved.posterior_pre, weights.posterior_norm)[0].to(dtype)
    grad_deter = grad_deter + carry.deter
    grad_deter = grad_deter + torch.cat([posterior_pre, carry.deter_layer], -1) @ weights.dense.t()
    through_block = torch.bmm(to_blocks(carry.core_pre, shape.blocks), weights.block.transpose(1, 2))
    grad_deter = at_least_float32(grad_deter + from_blocks(through_block))
    # The gates.
    reset, candidate, update = (at_least_float32(from_blocks(part)) for part in saved.gates.chunk(3, -1))
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
    new = torch.tanh(reset * candidate)
    before = at_least_float32(previous_deter) * keep
    grad_new = grad_deter * update * (1 - new.square())
    grad_gates = torch.cat(
        [
            to_blocks(grad_new * candidate * reset * (1 - reset), shape.blocks),
            to_blocks(grad_new * reset, shape.blocks),
            to_blocks(grad_deter * (new - before) * update * (1 - update), shape.blocks),
        ],
        -1,
    ).to(dtype)
    grad_core = from_blocks(torch.bmm(grad_gates, weights.gates.transpose(1, 2)))
    core_pre = norm_silu_backward(grad_core, saved.core_pre, weights.core_norm)[0].to(dtype)
    grad_inputs = core_pre @ weights.inputs.t()
    deter_pre = norm_silu_backward(grad_inputs[:, :hidden], saved.deter_pre, weights.deter_norm)[0]
    stoch_pre = norm_silu_backward(grad_inputs[:, hidden:], saved.stoch_pre, weights.stoch_norm)[0]
    deter_pre, stoch_pre, keep = deter_pre.to(dtype), stoch_pre.to(dtype), keep.to(dtype)
    through_gate = (grad_deter * (1 - update)).to(dtype) * keep
    carry = Carry(deter_pre * keep, stoch_pre * keep, core_pre * keep, through_gate)
    gradients = Gradients(
        grad_logits, grad_posterior, posterior_pre, grad_gates, grad_core, core_pre, grad_inputs, deter_pre, stoch_pre
    )
    return carry, gradients


def weight_gradients(
    previous_deter: Tensor,
    previous_stoch: Tensor,
    deter: Tensor,
    keep: Tensor,
    saved: Saved,
    gradients: Gradients,
    weights: ScanWeights,
    shape: ScanShape,
) -> ScanWeights:
    """Every weight gradient as one product over all T·B rows. Arguments are stacked over time."""
    dtype, hidden, blocks = weights.stoch.dtype, weights.stoch.shape[1], shape.blocks

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def block_rows(x: Tensor) -> Tensor:  # [T, B, G·n] → [G, T·B, n]
        return rows(x).view(x.shape[0] * x.shape[1], blocks, -1).transpose(0, 1)

    def gate_rows(x: Tensor) -> Tensor:  # [T, G, B, n] → [G, T·B, n]
        return x.transpose(0, 1).flatten(1, 2)

    def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return rows(norm_silu_backward(grad, x, weight)[1]).sum(0)

    keep = keep.to(dtype)
    masked_deter, masked_stoch = previous_deter * keep, previous_stoch * keep
    gates = gate_rows(gradients.gates)
    return ScanWeights(
        block=torch.bmm(block_rows(masked_deter).transpose(1, 2), block_rows(gradients.core_pre)),
        dense=torch.cat(
            [
                rows(deter).t() @ rows(gradients.posterior_pre),
                rows(masked_deter).t() @ rows(gradients.deter_pre),
            ],
            -1,
        ),
        stoch=rows(masked_stoch).t() @ rows(gradients.stoch_pre),
        inputs=rows(saved.inputs).t() @ rows(gradients.core_pre),
        gates=torch.bmm(block_rows(saved.core).transpose(1, 2), gates),
        gates_bias=gates.sum(1, keepdim=True),
        logits=rows(saved.posterior).t() @ rows(gradients.logits),
        logits_bias=rows(gradients.logits).sum(0),
        deter_bias=rows(gradients.deter_pre).sum(0),
        stoch_bias=rows(gradients.stoch_pre).sum(0),
        deter_norm=norm_gradient(gradients.inputs[..., :hidden], saved.deter_pre, weights.deter_norm),
        stoch_norm=norm_gradient(gradients.inputs[..., hidden:], saved.stoch_pre, weights.stoch_norm),
        core_norm=norm_gradient(gradients.core, saved.core_pre, weights.core_norm),
        posterior_norm=norm_gradient(gradients.posterior, saved.posterior_pre, weights.posterior_norm),
    )


class ScanFunctions(NamedTuple):
    """The two step functions, as they are or compiled."""

    forward: Callable[..., Any] = forward_step
    backward: Callable[..., Any] = backward_step


class PosteriorScan(torch.autograd.Function):
    """(deter, stoch, logits) of every step, from the parts that were computed outside the loop."""

    @staticmethod
    def forward(
        ctx: Any,
        functions: ScanFunctions,
        shape: ScanShape,
        deter: Tensor,
        stoch: Tensor,
        keep: Tensor,
        action_part: Tensor,
        embed_part: Tensor,
        noise: Tensor,
        *weight_tuple: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = ScanWeights(*weight_tuple)
        initial_deter, initial_stoch = deter, stoch
        dense = deter @ weights.dense
        deters, stochs, logit_list, saved_list = [], [], [], []
        for t in range(keep.shape[0]):
            deter, stoch, logits, dense, saved = functions.forward(
                deter, stoch, dense, keep[t], action_part[t], embed_part[t], noise[t], weights, shape
            )
            deters.append(deter)
            stochs.append(stoch)
            logit_list.append(logits)
            saved_list.append(saved)
        deters_all, stochs_all, logits_all = torch.stack(deters), torch.stack(stochs), torch.stack(logit_list)
        ctx.functions, ctx.shape, ctx.steps = functions, shape, saved_list
        ctx.save_for_backward(initial_deter, initial_stoch, keep, deters_all, stochs_all, logits_all, *weights)
        return deters_all, stochs_all, logits_all

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_deter, grad_stoch, grad_logits = grads
        initial_deter, initial_stoch, keep, deter, stoch, logits, *weight_tuple = ctx.saved_tensors
        weights, shape = ScanWeights(*weight_tuple), ctx.shape
        previous_deter = torch.cat([initial_deter.unsqueeze(0), deter[:-1]])
        previous_stoch = torch.cat([initial_stoch.unsqueeze(0), stoch[:-1]])
        hidden = weights.stoch.new_zeros(deter.shape[1], weights.stoch.shape[1])
        carry = Carry(hidden, hidden, torch.zeros_like(initial_deter), torch.zeros_like(initial_deter))
        collected: list[Gradients] = []
        for t in reversed(range(keep.shape[0])):
            carry, gradients = ctx.functions.backward(
                carry,
                grad_deter[t],
                grad_stoch[t],
                grad_logits[t],
                keep[t],
                previous_deter[t],
                logits[t],
                ctx.steps[t],
                weights,
                shape,
            )
            collected.append(gradients)
        stacked = Gradients(*(torch.stack(part[::-1]) for part in zip(*collected, strict=True)))
        saved = Saved(*(torch.stack(part) for part in zip(*ctx.steps, strict=True)))
        by_weight = weight_gradients(previous_deter, previous_stoch, deter, keep, saved, stacked, weights, shape)
        by_weight = ScanWeights(*(grad.to(weight.dtype) for grad, weight in zip(by_weight, weights, strict=True)))
        return None, None, None, None, None, stacked.core_pre, stacked.posterior_pre, None, *by_weight

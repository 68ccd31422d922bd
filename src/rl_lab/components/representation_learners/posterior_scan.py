"""The recurrence of the block RSSM over a whole sequence, with a backward pass written by hand.

An update spends most of its time in the steps that cannot run side by side. So everything that is not recurrent is
done outside the loop (the action's and the observation's part of the layers, all noise), and the loop is one autograd
function: its backward loop carries activation gradients only, and each weight gradient is one product over all steps at
the end. `BlockRSSM.observe_step` is the same recurrence in plain form; the tests hold the two together.

Here the loops run `forward_step` and `backward_step`, as they are or compiled. `posterior_kernels` has the same loops
as a few fused kernels per step, for bfloat16 on a GPU.

Symbols: T time, B batch, D deter, G blocks, d = D/G, U hidden, Z = groups × classes. Everything here is time-major.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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
    """What does not depend on the recurrence, and the state before the first step."""

    deter: Tensor  # [B, D]
    stoch: Tensor  # [B, Z]
    keep: Tensor  # [T, B, 1] 0 where an episode starts
    action_part: Tensor  # [T, B, D] of the core layer
    embed_part: Tensor  # [T, B, U] of the posterior layer
    noise: Tensor  # [T, B, groups, classes]


class Path(NamedTuple):
    """What the forward loop leaves, stacked over time (and what one step leaves, without the T)."""

    deter: Tensor  # [T, B, D]
    stoch: Tensor  # [T, B, Z]
    logits: Tensor  # [T, B, Z]
    inputs_pre: Tensor  # [T, B, 2U] the deter and the stoch layer before their norms
    core_pre: Tensor  # [T, B, D]
    gates: Tensor  # [T, B, 3D] block by block: (reset | candidate | update)
    posterior_pre: Tensor  # [T, B, U]


class PathGradients(NamedTuple):
    """What the backward loop leaves: gradients of what the layers give, after norm and activation if there are any."""

    logits: Tensor  # [T, B, Z]
    posterior: Tensor  # [T, B, U]
    gates: Tensor  # [T, B, 3D]
    core: Tensor  # [T, B, D]
    inputs: Tensor  # [T, B, 2U]


class Loops(Protocol):
    """The two loops over time."""

    def suit(self, inputs: ScanInputs, weights: ScanWeights) -> bool:
        """Whether they are made for tensors of this kind and size."""
        ...

    def forward(self, inputs: ScanInputs, weights: ScanWeights, shape: ScanShape) -> Path: ...

    def backward(
        self,
        grads: tuple[Tensor, Tensor, Tensor],
        inputs: ScanInputs,
        path: Path,
        weights: ScanWeights,
        shape: ScanShape,
    ) -> PathGradients:
        """`grads`: of deter, stoch and logits, [T, B, size] each."""
        ...


# Pieces of a layer ----------------------------------------------------------------------------------------------------


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


def norm_tables(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(slope, drag): the gradient through norm_silu is slope·grad - mean(slope·grad·x)·drag."""
    x = at_least_float32(x)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
    y = x * scale * weight
    gate = torch.sigmoid(y)
    return scale * weight * gate * (1 + y * (1 - gate)), x * scale.square()


def halves(function: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Any]:
    """Apply a function to the deter layer's half and to the stoch layer's half."""
    left, right = zip(*(tensor.chunk(2, -1) for tensor in tensors), strict=True)
    return function(*left), function(*right)


def normed_inputs(inputs_pre: Tensor, weights: ScanWeights) -> Tensor:
    return torch.cat(halves(norm_silu, inputs_pre, weights.inputs_norm), -1)


def split_gates(gates: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, 3D] → reset, candidate and update before their activations, [B, D] each, in float32 or better."""
    parts = at_least_float32(gates).unflatten(-1, (blocks, 3, -1)).unbind(-2)
    reset, candidate, update = (part.flatten(-2) for part in parts)
    return reset, candidate, update


def gated_update(gates: Tensor, deter: Tensor, blocks: int) -> Tensor:
    """The block GRU: `update` is the share of new content."""
    reset, candidate, update = split_gates(gates, blocks)
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    return torch.lerp(at_least_float32(deter), candidate, torch.sigmoid(update - 1))


# One step -------------------------------------------------------------------------------------------------------------


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
) -> tuple[Path, Tensor]:
    """One posterior step, and the dense product of the new deter."""
    dtype, hidden = weights.stoch.dtype, weights.stoch.shape[1]
    inputs_pre = torch.cat([dense[:, hidden:], stoch @ weights.stoch], -1)
    inputs_pre = at_least_float32(inputs_pre) * keep + weights.inputs_bias
    inputs = normed_inputs(inputs_pre, weights).to(dtype)
    deter = deter * keep.to(dtype)
    core_pre = inputs @ weights.inputs + from_blocks(torch.bmm(to_blocks(deter, shape.blocks), weights.block))
    core_pre = core_pre + action_part
    core = norm_silu(core_pre, weights.core_norm).to(dtype)
    gates = from_blocks(torch.bmm(to_blocks(core, shape.blocks), weights.gates)) + weights.gates_bias
    deter = gated_update(gates, deter, shape.blocks).to(dtype)
    dense = deter @ weights.dense
    posterior_pre = dense[:, :hidden] + embed_part
    posterior = norm_silu(posterior_pre, weights.posterior_norm).to(dtype)
    logits = torch.addmm(weights.logits_bias, posterior, weights.logits)
    probs = at_least_float32(logits).unflatten(-1, (shape.groups, shape.classes)).softmax(-1)
    probs = (1 - shape.unimix) * probs + shape.unimix / shape.classes
    choice = (probs / noise).argmax(-1, keepdim=True)
    stoch = (choice == torch.arange(shape.classes, device=choice.device)).flatten(-2).to(dtype)
    return Path(deter, stoch, logits, inputs_pre, core_pre, gates, posterior_pre), dense


class Carry(NamedTuple):
    """Gradients that reach a step from the one after it, already masked by that step's `keep`."""

    deter_layer: Tensor  # [B, U] of the deter layer's pre-activation
    stoch_layer: Tensor  # [B, U]
    core_pre: Tensor  # [B, D]
    deter: Tensor  # [B, D] straight through the gate


def backward_step(
    carry: Carry,
    grads: tuple[Tensor, Tensor, Tensor],
    keep: Tensor,
    previous_deter: Tensor,
    path: Path,
    weights: ScanWeights,
    shape: ScanShape,
) -> tuple[Carry, PathGradients]:
    """The reverse of `forward_step`; no weight gradients here."""
    dtype = weights.stoch.dtype
    grad_deter, grad_stoch, grad_logits = grads
    # Straight-through sample: the gradient of the one-hot is the gradient of its probabilities.
    grad_sample = at_least_float32(carry.stoch_layer @ weights.stoch.t() + grad_stoch)
    grad_sample = grad_sample.unflatten(-1, (shape.groups, shape.classes))
    probs = at_least_float32(path.logits).unflatten(-1, (shape.groups, shape.classes)).softmax(-1)
    grad_sample = (1 - shape.unimix) * probs * (grad_sample - (probs * grad_sample).sum(-1, keepdim=True))
    grad_logits = (grad_sample.flatten(-2) + grad_logits).to(dtype)
    grad_posterior = grad_logits @ weights.logits.t()
    posterior_pre = norm_silu_backward(grad_posterior, path.posterior_pre, weights.posterior_norm)[0].to(dtype)
    grad_deter = grad_deter + carry.deter
    grad_deter = grad_deter + torch.cat([posterior_pre, carry.deter_layer], -1) @ weights.dense.t()
    through_block = torch.bmm(to_blocks(carry.core_pre, shape.blocks), weights.block.transpose(1, 2))
    grad_deter = at_least_float32(grad_deter + from_blocks(through_block))
    # The gates.
    reset, candidate, update = split_gates(path.gates, shape.blocks)
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
    new = torch.tanh(reset * candidate)
    before = at_least_float32(previous_deter) * keep
    grad_new = grad_deter * update * (1 - new.square())
    by_gate = (
        grad_new * candidate * reset * (1 - reset),
        grad_new * reset,
        grad_deter * (new - before) * update * (1 - update),
    )
    by_gate_and_block = torch.stack([part.unflatten(-1, (shape.blocks, -1)) for part in by_gate], -2)
    grad_gates = by_gate_and_block.flatten(-3).to(dtype)
    grad_core = from_blocks(torch.bmm(to_blocks(grad_gates, shape.blocks), weights.gates.transpose(1, 2)))
    core_pre = norm_silu_backward(grad_core, path.core_pre, weights.core_norm)[0].to(dtype)
    grad_inputs = core_pre @ weights.inputs.t()
    keep = keep.to(dtype)
    deter_layer, stoch_layer = (
        grad_x.to(dtype) * keep
        for grad_x, _ in halves(norm_silu_backward, grad_inputs, path.inputs_pre, weights.inputs_norm)
    )
    through_gate = (grad_deter * (1 - update)).to(dtype) * keep
    carry = Carry(deter_layer, stoch_layer, core_pre * keep, through_gate)
    return carry, PathGradients(grad_logits, grad_posterior, grad_gates, grad_core, grad_inputs)


# All steps ------------------------------------------------------------------------------------------------------------


def with_first(first: Tensor, following: Tensor) -> Tensor:
    """What came before each step: `first`, then all of `following` but its last."""
    return torch.cat([first.unsqueeze(0), following[:-1]])


class StepLoops(NamedTuple):
    """The loops step by step; the step functions as they are, or compiled."""

    forward_step: Callable[..., tuple[Path, Tensor]] = forward_step
    backward_step: Callable[..., tuple[Carry, PathGradients]] = backward_step

    def suit(self, inputs: ScanInputs, weights: ScanWeights) -> bool:
        return True

    def forward(self, inputs: ScanInputs, weights: ScanWeights, shape: ScanShape) -> Path:
        deter, stoch, dense, steps = inputs.deter, inputs.stoch, inputs.deter @ weights.dense, []
        for t in range(inputs.keep.shape[0]):
            outside = inputs.keep[t], inputs.action_part[t], inputs.embed_part[t], inputs.noise[t]
            step, dense = self.forward_step(deter, stoch, dense, *outside, weights, shape)
            deter, stoch = step.deter, step.stoch
            steps.append(step)
        return Path(*(torch.stack(part) for part in zip(*steps, strict=True)))

    def backward(
        self, grads: tuple[Tensor, Tensor, Tensor], inputs: ScanInputs, path: Path, weights: ScanWeights,
        shape: ScanShape,
    ) -> PathGradients:  # fmt: skip
        previous, collected = with_first(inputs.deter, path.deter), []
        no_hidden, no_deter = torch.zeros_like(path.posterior_pre[0]), torch.zeros_like(inputs.deter)
        no_hidden = no_hidden.to(inputs.deter.dtype)
        carry = Carry(no_hidden, no_hidden, no_deter, no_deter)
        for t in reversed(range(inputs.keep.shape[0])):
            by_output = grads[0][t], grads[1][t], grads[2][t]
            step = Path(*(part[t] for part in path))
            carry, gradients = self.backward_step(carry, by_output, inputs.keep[t], previous[t], step, weights, shape)
            collected.append(gradients)
        return PathGradients(*(torch.stack(part[::-1]) for part in zip(*collected, strict=True)))


def outside_gradients(
    inputs: ScanInputs, path: Path, gradients: PathGradients, weights: ScanWeights, shape: ScanShape
) -> tuple[Tensor, Tensor, ScanWeights]:
    """Of the action's part, the embedding's part and every weight: each is one product over all T·B rows."""
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
    layer_inputs = normed_inputs(path.inputs_pre, weights).to(dtype)
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


class ScanFunctions(NamedTuple):
    """How a scan is computed: its loops, and what is done once for all steps after the backward loop."""

    loops: Loops = StepLoops()
    outside_gradients: Callable[..., tuple[Tensor, Tensor, ScanWeights]] = outside_gradients


class PosteriorScan(torch.autograd.Function):
    """(deter, stoch, logits) of every step, from the parts that were computed outside the loop."""

    @staticmethod
    def forward(ctx: Any, functions: ScanFunctions, shape: ScanShape, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: those of `ScanInputs`, then those of `ScanWeights`."""
        count = len(ScanInputs._fields)
        path = functions.loops.forward(ScanInputs(*tensors[:count]), ScanWeights(*tensors[count:]), shape)
        ctx.functions, ctx.shape = functions, shape
        ctx.save_for_backward(*tensors, *path)
        return path.deter, path.stoch, path.logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts = len(ScanInputs._fields), len(ScanInputs._fields) + len(ScanWeights._fields)
        tensors = ctx.saved_tensors
        inputs, path = ScanInputs(*tensors[: counts[0]]), Path(*tensors[counts[1] :])
        weights = ScanWeights(*tensors[counts[0] : counts[1]])
        by_output = grads[0], grads[1], grads[2]
        gradients = ctx.functions.loops.backward(by_output, inputs, path, weights, ctx.shape)
        action_part, embed_part, by_weight = ctx.functions.outside_gradients(
            inputs, path, gradients, weights, ctx.shape
        )
        by_input = ScanInputs(None, None, None, action_part, embed_part, None)  # type: ignore[arg-type]
        return None, None, *by_input, *by_weight

"""The loops of the posterior scan in NumPy, for small models on the CPU.

There a step costs its calls, not its arithmetic, and NumPy's calls are the cheaper ones. Whatever the backward loop
needs of the forward pass alone is made for all steps at once, so that a step of it is six products and a few
multiplications.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_lab.components.representation_learners.posterior_scan import (
    NORM_EPS,
    Path,
    PathGradients,
    ScanInputs,
    ScanShape,
    ScanWeights,
    norm_tables,
    with_first,
)
from rl_lab.nn.host_mlp import ONE_THREAD, Array
from rl_lab.nn.math import in_full_on_host, softmax


class HostLoops:
    """`Loops` in NumPy."""

    def suit(self, inputs: ScanInputs, weights: ScanWeights) -> bool:
        """Whether no product is so large that it is better left to torch and its threads."""
        largest = max(weight.shape[-2:].numel() for weight in weights if weight.ndim > 1)
        return in_full_on_host(weights.stoch) and inputs.deter.shape[0] * largest <= ONE_THREAD

    @np.errstate(all="ignore")  # what is not finite is found where the losses are
    def forward(self, inputs: ScanInputs, weights: ScanWeights, shape: ScanShape) -> Path:
        (steps, batch, _), deter_size, (stoch_size, hidden) = inputs.keep.shape, len(weights.dense), weights.stoch.shape
        sizes = (deter_size, stoch_size, stoch_size, 2 * hidden, deter_size, 3 * deter_size, hidden)
        path = Path(*(inputs.deter.new_empty(steps, batch, size) for size in sizes))
        w, given, by_step = _arrays(weights), _arrays(inputs), zip(*_arrays(path), strict=True)
        layer_norms, classes = w.inputs_norm.reshape(2, hidden), np.arange(shape.classes)
        before, stoch_before, dense = given.deter, given.stoch, given.deter @ w.dense
        for t, (deter, stoch, logits, inputs_pre, core_pre, gates, posterior_pre) in enumerate(by_step):
            keep = given.keep[t]
            inputs_pre[:, :hidden] = dense[:, hidden:]
            np.matmul(stoch_before, w.stoch, out=inputs_pre[:, hidden:])
            inputs_pre *= keep
            inputs_pre += w.inputs_bias
            layers = _norm_silu(inputs_pre.reshape(batch, 2, hidden), layer_norms)
            before = before * keep
            block_product(before, w.block, out=core_pre)
            core_pre += layers.reshape(batch, -1) @ w.inputs
            core_pre += given.action_part[t]
            block_product(_norm_silu(core_pre, w.core_norm), w.gates, out=gates)
            gates += w.gates_bias
            _gated_update(gates, before, shape.blocks, out=deter)
            dense = deter @ w.dense
            np.add(dense[:, :hidden], given.embed_part[t], out=posterior_pre)
            np.matmul(_norm_silu(posterior_pre, w.posterior_norm), w.logits, out=logits)
            logits += w.logits_bias
            probs = _softmax(logits.reshape(batch, shape.groups, -1))
            probs *= 1.0 - shape.unimix
            probs += shape.unimix / shape.classes
            probs /= given.noise[t]
            np.equal(probs.argmax(-1)[..., None], classes, out=stoch.reshape(probs.shape), casting="unsafe")
            before, stoch_before = deter, stoch
        return path

    @np.errstate(all="ignore")
    def backward(
        self, grads: tuple[Tensor, Tensor, Tensor], inputs: ScanInputs, path: Path, weights: ScanWeights,
        shape: ScanShape,
    ) -> PathGradients:  # fmt: skip
        (steps, batch, _), hidden = inputs.keep.shape, weights.stoch.shape[1]
        w, keep, tables = _arrays(weights), _array(inputs.keep), _tables(inputs, path, weights, shape)
        by_deter, by_stoch, by_logits = (_array(grad) for grad in grads)
        gradients = PathGradients(*(torch.empty_like(part) for part in (
            path.logits, path.posterior_pre, path.gates, path.core_pre, path.inputs_pre
        )))  # fmt: skip
        whole = _arrays(gradients)
        # What reaches a step from the one after it. `dense`: its own posterior layer | the next one's deter layer.
        dense, stoch_layer = np.zeros_like(whole.inputs[0]), np.zeros_like(whole.posterior[0])
        core_pre, through_gate = np.zeros_like(whole.core[0]), np.zeros_like(whole.core[0])
        through_block = np.empty_like(core_pre)
        for t in reversed(range(steps)):
            logits, posterior, gates, core, layers = (part[t] for part in whole)
            # Straight-through sample: the gradient of the one-hot is the gradient of its probabilities.
            probs, sample = tables.probs[t], stoch_layer @ w.stoch.T
            sample += by_stoch[t]
            sample = sample.reshape(probs.shape)
            sample = sample - _row_products(probs, sample)
            sample *= tables.mixed_probs[t]
            np.add(sample.reshape(batch, -1), by_logits[t], out=logits)
            np.matmul(logits, w.logits.T, out=posterior)
            dense[:, :hidden] = tables.posterior.backward(t, posterior)
            grad_deter = dense @ w.dense.T
            block_product(core_pre, w.block.transpose(0, 2, 1), out=through_block)
            for part in (through_block, through_gate, by_deter[t]):
                grad_deter += part
            by_gate = gates.reshape(tables.gates.shape[1:])
            np.multiply(tables.gates[t], grad_deter.reshape(batch, shape.blocks, 1, -1), out=by_gate)
            through_gate = grad_deter * tables.through_gate[t]
            block_product(gates, w.gates.transpose(0, 2, 1), out=core)
            core_pre = tables.core.backward(t, core)
            np.matmul(core_pre, w.inputs.T, out=layers)
            core_pre *= keep[t]
            layers_pre = tables.inputs.backward(t, layers.reshape(batch, 2, hidden))
            dense[:, hidden:], stoch_layer = layers_pre[:, 0], layers_pre[:, 1]
        return gradients


# What the backward loop looks up --------------------------------------------------------------------------------------


class _NormTable(NamedTuple):
    """The derivative of norm_silu at every step."""

    slope: Array
    drag: Array
    x: Array

    def backward(self, t: int, grad: Array) -> Array:
        steep = grad * self.slope[t]
        steep -= _row_products(steep, self.x[t]) * self.drag[t]
        return steep


class _Tables(NamedTuple):
    """Of all steps: what a gradient is multiplied with."""

    probs: Array  # [T, B, groups, classes]
    mixed_probs: Array  # the same times the share of the softmax
    posterior: _NormTable
    core: _NormTable
    inputs: _NormTable  # [T, B, 2, U], zeros where an episode starts
    gates: Array  # [T, B, G, 3, d] from the new deter to each gate
    through_gate: Array  # [T, B, D] from the new deter to the one before it


def _tables(inputs: ScanInputs, path: Path, weights: ScanWeights, shape: ScanShape) -> _Tables:
    probs = softmax(path.logits.unflatten(-1, (shape.groups, shape.classes)))
    layers = (2, weights.stoch.shape[1])
    keep = inputs.keep.unsqueeze(-1)
    # The gates, block by block: [T, B, G, d].
    reset, candidate, update = path.gates.unflatten(-1, (shape.blocks, 3, -1)).unbind(-2)
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
    new = torch.from_numpy(np.tanh((reset * candidate).numpy()))
    before = (with_first(inputs.deter, path.deter) * inputs.keep).view_as(new)
    by_new = update * (1 - new.square())
    by_candidate = by_new * reset
    gates = torch.stack(
        [by_candidate * candidate * (1 - reset), by_candidate, (new - before) * update * (1 - update)], -2
    )
    return _Tables(
        _array(probs), _array((1.0 - shape.unimix) * probs),
        posterior=_norm_table(path.posterior_pre, weights.posterior_norm),
        core=_norm_table(path.core_pre, weights.core_norm),
        inputs=_norm_table(path.inputs_pre.unflatten(-1, layers), weights.inputs_norm.view(layers), keep),
        gates=_array(gates),
        through_gate=_array(((1 - update) * keep).flatten(-2)),
    )  # fmt: skip


def _norm_table(x: Tensor, weight: Tensor, keep: Tensor | float = 1.0) -> _NormTable:
    slope, drag = norm_tables(x, weight)
    return _NormTable(_array(slope * keep), _array(drag / x.shape[-1]), _array(x))


# Pieces of a step -----------------------------------------------------------------------------------------------------


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy()


def _arrays(tensors: ScanInputs | ScanWeights | Path | PathGradients) -> Any:
    """The same record, with arrays in the same memory."""
    return type(tensors)(*(_array(tensor) for tensor in tensors))  # type: ignore[arg-type]


def _row_products(left: Array, right: Array) -> Array:
    """Sums over the last axis, which stays, of size one."""
    return np.matmul(left[..., None, :], right[..., :, None])[..., 0]


def block_product(x: Array, weight: Array, *, out: Array) -> None:
    """[rows, G·n] times [*several, G, n, m], block by block, to [*several, rows, G·m]."""
    blocks, *block = weight.shape[-3:]
    x, out = (part.reshape(*part.shape[:-1], blocks, -1).swapaxes(-3, -2) for part in (x, out))
    rows = max(1, ONE_THREAD // (block[0] * block[1]))
    for start in range(0, x.shape[1], rows):
        np.matmul(x[:, start : start + rows], weight, out=out[..., start : start + rows, :])


def _sigmoid(x: Array) -> Array:
    growth = np.exp(-x)
    growth += 1.0
    return np.divide(1.0, growth, out=growth)


def _norm_silu(x: Array, weight: Array) -> Array:
    size = _row_products(x, x)
    size /= x.shape[-1]
    size += NORM_EPS
    y = x / np.sqrt(size, out=size)
    y *= weight
    growth = np.exp(-y)
    growth += 1.0
    y /= growth
    return y


def _gated_update(gates: Array, deter: Array, blocks: int, *, out: Array) -> None:
    by_block = (gates.shape[0], blocks, -1)
    reset, candidate, update = gates.reshape(gates.shape[0], blocks, 3, -1).swapaxes(0, 2).swapaxes(1, 2)
    change = _sigmoid(reset)
    change *= candidate
    np.tanh(change, out=change)
    change -= deter.reshape(by_block)
    change *= _sigmoid(update - 1.0)
    np.add(deter.reshape(by_block), change, out=out.reshape(by_block))


def _softmax(logits: Array) -> Array:
    weights = logits - logits.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    return weights

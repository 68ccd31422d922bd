"""The loops of the posterior scan for small models on the CPU, in float32.

There a step costs its calls, not its arithmetic: it is six products by NumPy, whose calls are cheaper than torch's, and
a kernel for what lies between two of them.
"""

from __future__ import annotations

from typing import Any

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
    with_first,
)
from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.host_mlp import ONE_THREAD, Array
from rl_lab.nn.math import in_float32_on_host


class HostLoops:
    """`Loops` in NumPy and kernels."""

    def suit(self, inputs: ScanInputs, weights: ScanWeights) -> bool:
        """Whether no product is so large that it is better left to torch and its threads."""
        largest = max(weight.shape[-2:].numel() for weight in weights if weight.ndim > 1)
        return in_float32_on_host(weights.stoch) and inputs.deter.shape[0] * largest <= ONE_THREAD

    def forward(self, inputs: ScanInputs, weights: ScanWeights, shape: ScanShape) -> Path:
        (steps, batch, _), deter_size, (stoch_size, hidden) = inputs.keep.shape, len(weights.dense), weights.stoch.shape
        sizes = (deter_size, stoch_size, stoch_size, 2 * hidden, deter_size, 3 * deter_size, hidden)
        path = Path(*(inputs.deter.new_empty(steps, batch, size) for size in sizes))
        w, given, by_step = _arrays(weights), _arrays(inputs), zip(*_arrays(path), strict=True)
        input_norms, core_norm, posterior_norm = _norms(w, hidden)
        by_gate, by_group = (batch, shape.blocks, 3, -1), (-1, shape.classes)
        before, stoch_before, dense = given.deter, given.stoch, given.deter @ w.dense
        layers, core, posterior = (np.empty((batch, size), np.float32) for size in (2 * hidden, deter_size, hidden))
        for t, (deter, stoch, logits, inputs_pre, core_pre, gates, posterior_pre) in enumerate(by_step):
            keep = given.keep[t]
            inputs_pre[:, :hidden] = dense[:, hidden:]
            np.matmul(stoch_before, w.stoch, out=inputs_pre[:, hidden:])
            inputs_pre *= keep
            inputs_pre += w.inputs_bias
            kernels.norm_silu_to(inputs_pre.reshape(-1, hidden), input_norms, NORM_EPS, layers.reshape(-1, hidden))
            before = before * keep
            block_product(before, w.block, out=core_pre)
            core_pre += layers @ w.inputs
            core_pre += given.action_part[t]
            kernels.norm_silu_to(core_pre, core_norm, NORM_EPS, core)
            block_product(core, w.gates, out=gates)
            gates += w.gates_bias
            kernels.gated_update(gates.reshape(by_gate), before, deter)
            dense = deter @ w.dense
            np.add(dense[:, :hidden], given.embed_part[t], out=posterior_pre)
            kernels.norm_silu_to(posterior_pre, posterior_norm, NORM_EPS, posterior)
            np.matmul(posterior, w.logits, out=logits)
            logits += w.logits_bias
            noise = given.noise[t].reshape(by_group)
            kernels.sample_one_hot(logits.reshape(by_group), noise, shape.unimix, stoch.reshape(by_group))
            before, stoch_before = deter, stoch
        return path

    def backward(
        self, grads: tuple[Tensor, Tensor, Tensor], inputs: ScanInputs, path: Path, weights: ScanWeights,
        shape: ScanShape,
    ) -> PathGradients:  # fmt: skip
        (steps, batch, _), hidden = inputs.keep.shape, weights.stoch.shape[1]
        w, keep, seen = _arrays(weights), _array(inputs.keep), _arrays(path)
        before = _array(with_first(inputs.deter, path.deter) * inputs.keep)
        by_deter, by_stoch, by_logits = (_array(grad) for grad in grads)
        input_norms, core_norm, posterior_norm = _norms(w, hidden)
        by_gate, by_group = (batch, shape.blocks, 3, -1), (-1, shape.classes)
        gradients = PathGradients(*(torch.empty_like(part) for part in (
            path.logits, path.posterior_pre, path.gates, path.core_pre, path.inputs_pre
        )))  # fmt: skip
        whole = _arrays(gradients)
        whole.logits[:] = by_logits
        # What reaches a step from the one after it. `dense`: its own posterior layer | the next one's deter layer.
        dense, stoch_layer = np.zeros_like(whole.inputs[0]), np.zeros_like(whole.posterior[0])
        core_pre, through_gate = np.zeros_like(whole.core[0]), np.zeros_like(whole.core[0])
        through_block, layers_pre = np.empty_like(core_pre), np.empty_like(whole.inputs[0])
        posterior_pre = np.empty_like(stoch_layer)
        for t in reversed(range(steps)):
            logits, posterior, gates, core, layers = (part[t] for part in whole)
            sample = stoch_layer @ w.stoch.T
            sample += by_stoch[t]
            kernels.straight_through_backward(
                sample.reshape(by_group), seen.logits[t].reshape(by_group), shape.unimix, logits.reshape(by_group)
            )
            np.matmul(logits, w.logits.T, out=posterior)
            kernels.norm_silu_to_backward(posterior, seen.posterior_pre[t], posterior_norm, NORM_EPS, posterior_pre)
            dense[:, :hidden] = posterior_pre
            grad_deter = dense @ w.dense.T
            block_product(core_pre, w.block.transpose(0, 2, 1), out=through_block)
            for part in (through_block, through_gate, by_deter[t]):
                grad_deter += part
            kernels.gated_update_backward(
                grad_deter, seen.gates[t].reshape(by_gate), before[t], gates.reshape(by_gate), through_gate
            )
            through_gate *= keep[t]
            block_product(gates, w.gates.transpose(0, 2, 1), out=core)
            kernels.norm_silu_to_backward(core, seen.core_pre[t], core_norm, NORM_EPS, core_pre)
            np.matmul(core_pre, w.inputs.T, out=layers)
            core_pre *= keep[t]
            both = (part.reshape(-1, hidden) for part in (layers, seen.inputs_pre[t]))
            kernels.norm_silu_to_backward(*both, input_norms, NORM_EPS, layers_pre.reshape(-1, hidden))
            layers_pre *= keep[t]
            dense[:, hidden:], stoch_layer = layers_pre[:, :hidden], layers_pre[:, hidden:]
        return gradients


def host_outside_gradients(
    inputs: ScanInputs, path: Path, gradients: PathGradients, weights: ScanWeights, shape: ScanShape
) -> tuple[Tensor, Tensor, ScanWeights]:
    """`outside_gradients` with kernels."""

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def by_block(x: Tensor) -> Tensor:  # [T, B, G·n] → [G, T·B, n]
        return rows(x).unflatten(-1, (shape.blocks, -1)).transpose(0, 1)

    before, stoch_before = (
        with_first(first, path_part) * inputs.keep
        for first, path_part in ((inputs.deter, path.deter), (inputs.stoch, path.stoch))
    )
    hidden = weights.stoch.shape[1]
    layers, layers_pre, inputs_norm = _normed(gradients.inputs, path.inputs_pre, weights.inputs_norm.view(2, hidden))
    core, core_pre, core_norm = _normed(gradients.core, path.core_pre, weights.core_norm[None])
    posterior, posterior_pre, posterior_norm = _normed(
        gradients.posterior, path.posterior_pre, weights.posterior_norm[None]
    )
    by_weight = ScanWeights(
        block=by_block(before).transpose(1, 2) @ by_block(core_pre),
        dense=torch.cat([
            rows(path.deter).t() @ rows(posterior_pre), rows(before).t() @ rows(layers_pre)[:, :hidden]
        ], -1),
        stoch=rows(stoch_before).t() @ rows(layers_pre)[:, hidden:],
        inputs=rows(layers).t() @ rows(core_pre),
        gates=by_block(core).transpose(1, 2) @ by_block(gradients.gates),
        gates_bias=rows(gradients.gates).sum(0),
        logits=rows(posterior).t() @ rows(gradients.logits),
        logits_bias=rows(gradients.logits).sum(0),
        inputs_bias=rows(layers_pre).sum(0),
        inputs_norm=inputs_norm.flatten(),
        core_norm=core_norm[0],
        posterior_norm=posterior_norm[0],
    )  # fmt: skip
    return core_pre, posterior_pre, by_weight


def _normed(grad: Tensor, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the norm and SiLU gave of `x`, and the gradients by `x` and by the scales [count, size] of its parts."""
    out, by_x, by_scales = torch.empty_like(x), torch.empty_like(x), torch.empty_like(scales)
    norms, size = _array(scales), scales.shape[1]
    given, seen, result, gradient = (_array(part).reshape(-1, size) for part in (grad, x, out, by_x))
    kernels.norm_silu_to(seen, norms, NORM_EPS, result)
    kernels.norm_silu_to_backward(given, seen, norms, NORM_EPS, gradient)
    kernels.norm_silu_scale_backward(given, seen, norms, NORM_EPS, by_scales.numpy())
    return out, by_x, by_scales


def block_product(x: Array, weight: Array, *, out: Array) -> None:
    """[rows, G·n] times [G, n, m], block by block, to [rows, G·m]."""
    blocks, *block = weight.shape
    x, out = (part.reshape(len(part), blocks, -1).swapaxes(0, 1) for part in (x, out))
    rows = max(1, ONE_THREAD // (block[0] * block[1]))
    for start in range(0, x.shape[1], rows):
        np.matmul(x[:, start : start + rows], weight, out=out[:, start : start + rows])


def _norms(weights: Any, hidden: int) -> tuple[Array, Array, Array]:
    """The scales of the input layers, the core and the posterior layer, [count, size] each."""
    return weights.inputs_norm.reshape(2, hidden), weights.core_norm[None], weights.posterior_norm[None]


def _array(tensor: Tensor) -> Array:
    return tensor.detach().contiguous().numpy()


def _arrays(tensors: ScanInputs | ScanWeights | Path | PathGradients) -> Any:
    """The same record, with arrays in the same memory."""
    return type(tensors)(*(_array(tensor) for tensor in tensors))  # type: ignore[arg-type]

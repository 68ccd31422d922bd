"""The loops of the posterior scan on the CPU, each as one kernel: see `rl_lab.nn.host_kernels`. The plain form of a
step is in `rl_lab.components.representation_learners.posterior_scan`, whose records these take, as arrays, and whose
symbols hold here.

Sequences do not depend on each other: threads can share them. `first` and `end` say which ones a call is about.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_lab.nn.host_kernels import (
    gated_update,
    gated_update_backward,
    kernel,
    norm_silu_to,
    norm_silu_to_backward,
    sample_one_hot,
    straight_through_backward,
)
from rl_lab.nn.layer_kernels import (
    add_block_product,
    add_product,
    product,
    set_rows,
)


@kernel
def scan_forward(
    given: Any, weights: Any, path: Any, blocks: Any, classes: Any, unimix: Any, eps: Any, first: Any, end: Any
) -> None:
    """From `ScanInputs` and `ScanWeights` to `Path`."""
    rows, hidden, deter_size = end - first, weights.stoch.shape[1], weights.dense.shape[0]
    input_norms = weights.inputs_norm.reshape(2, hidden)
    core_norm, posterior_norm = weights.core_norm.reshape(1, -1), weights.posterior_norm.reshape(1, -1)
    before, dense = np.empty((rows, deter_size), np.float32), np.empty((rows, 2 * hidden), np.float32)
    layers, core = np.empty((rows, 2 * hidden), np.float32), np.empty((rows, deter_size), np.float32)
    posterior = np.empty((rows, hidden), np.float32)
    product(given.deter[first:end], weights.dense, dense)
    for t in range(given.keep.shape[0]):
        deter_before = path.deter[t - 1, first:end] if t else given.deter[first:end]
        stoch_before = path.stoch[t - 1, first:end] if t else given.stoch[first:end]
        inputs_pre, core_pre = path.inputs_pre[t, first:end], path.core_pre[t, first:end]
        gates, posterior_pre = path.gates[t, first:end], path.posterior_pre[t, first:end]
        deter, stoch, logits = path.deter[t, first:end], path.stoch[t, first:end], path.logits[t, first:end]
        keep = given.keep[t, first:end]
        # The deterministic path.
        product(stoch_before, weights.stoch, inputs_pre[:, hidden:])
        for i in range(rows):
            for j in range(hidden):
                inputs_pre[i, j] = dense[i, hidden + j]
            for j in range(2 * hidden):
                inputs_pre[i, j] = inputs_pre[i, j] * keep[i, 0] + weights.inputs_bias[j]
            for j in range(deter_size):
                before[i, j] = deter_before[i, j] * keep[i, 0]
        norm_silu_to(inputs_pre.reshape(-1, hidden), input_norms, eps, layers.reshape(-1, hidden))
        core_pre[:] = given.action_part[t, first:end]
        add_block_product(before, weights.block, core_pre)
        add_product(layers, weights.inputs, core_pre)
        norm_silu_to(core_pre, core_norm, eps, core)
        set_rows(gates, weights.gates_bias)
        add_block_product(core, weights.gates, gates)
        gated_update(gates.reshape(rows, blocks, 3, -1), before, deter)
        # A sample of the posterior.
        product(deter, weights.dense, dense)
        for i in range(rows):
            for j in range(hidden):
                posterior_pre[i, j] = dense[i, j] + given.embed_part[t, first + i, j]
        norm_silu_to(posterior_pre, posterior_norm, eps, posterior)
        set_rows(logits, weights.logits_bias)
        add_product(posterior, weights.logits, logits)
        noise = given.noise[t, first:end].reshape(-1, classes)
        sample_one_hot(logits.reshape(-1, classes), noise, unimix, stoch.reshape(-1, classes))


@kernel
def scan_backward(
    by_deter: Any, by_stoch: Any, before: Any, keep: Any, weights: Any, path: Any, gradients: Any, blocks: Any,
    classes: Any, unimix: Any, eps: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """To `PathGradients`, whose logits begin as what reaches them from outside. `before`: the deter before each step,
    0 where an episode starts. Matrices among the weights are transposed here."""
    rows, (hidden, stoch_size), deter_size = end - first, weights.stoch.shape, weights.dense.shape[1]
    input_norms = weights.inputs_norm.reshape(2, hidden)
    core_norm, posterior_norm = weights.core_norm.reshape(1, -1), weights.posterior_norm.reshape(1, -1)
    # What reaches a step from the one after it. `dense`: its own posterior layer | the next one's deter layer.
    dense, layers_pre = np.zeros((rows, 2 * hidden), np.float32), np.zeros((rows, 2 * hidden), np.float32)
    core_pre, through_gate = np.zeros((rows, deter_size), np.float32), np.zeros((rows, deter_size), np.float32)
    sample, posterior_pre = np.empty((rows, stoch_size), np.float32), np.empty((rows, hidden), np.float32)
    grad_deter = np.empty((rows, deter_size), np.float32)
    for t in range(keep.shape[0] - 1, -1, -1):
        logits, posterior = gradients.logits[t, first:end], gradients.posterior[t, first:end]
        gates, core = gradients.gates[t, first:end], gradients.core[t, first:end]
        layers, kept = gradients.inputs[t, first:end], keep[t, first:end]
        sample[:] = by_stoch[t, first:end]
        add_product(layers_pre[:, hidden:], weights.stoch, sample)
        seen = path.logits[t, first:end].reshape(-1, classes)
        straight_through_backward(sample.reshape(-1, classes), seen, unimix, logits.reshape(-1, classes))
        product(logits, weights.logits, posterior)
        norm_silu_to_backward(posterior, path.posterior_pre[t, first:end], posterior_norm, eps, posterior_pre)
        for i in range(rows):
            for j in range(hidden):
                dense[i, j] = posterior_pre[i, j]
            for j in range(deter_size):
                grad_deter[i, j] = through_gate[i, j] + by_deter[t, first + i, j]
        add_product(dense, weights.dense, grad_deter)
        add_block_product(core_pre, weights.block, grad_deter)
        own = path.gates[t, first:end].reshape(rows, blocks, 3, -1)
        by_gates = gates.reshape(rows, blocks, 3, -1)
        gated_update_backward(grad_deter, own, before[t, first:end], by_gates, through_gate)
        core[:] = np.float32(0.0)
        add_block_product(gates, weights.gates, core)
        norm_silu_to_backward(core, path.core_pre[t, first:end], core_norm, eps, core_pre)
        product(core_pre, weights.inputs, layers)
        pre = path.inputs_pre[t, first:end].reshape(-1, hidden)
        norm_silu_to_backward(layers.reshape(-1, hidden), pre, input_norms, eps, layers_pre.reshape(-1, hidden))
        for i in range(rows):
            for j in range(deter_size):
                through_gate[i, j] *= kept[i, 0]
                core_pre[i, j] *= kept[i, 0]
            for j in range(2 * hidden):
                layers_pre[i, j] *= kept[i, 0]
            for j in range(hidden):
                dense[i, hidden + j] = layers_pre[i, j]

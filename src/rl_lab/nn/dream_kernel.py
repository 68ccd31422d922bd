"""Dreams of the block RSSM on the CPU as one kernel: see `rl_lab.nn.host_kernels`.

A few rows go through all steps, the actor's layers included, before the next ones do: so they stay in the cache, and
threads that share the rows do not meet in between. Where the actor is of another kind, a step is a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rl_lab.nn.host_kernels import ONE, TWO, gated_update, kernel, norm_silu, part, sample_one_hot, sigmoid, tanh
from rl_lab.nn.host_mlp import Array
from rl_lab.nn.layer_kernels import MOST_ROWS, add_block_product, product, set_rows
from rl_lab.nn.stack_kernels import Kept, LayerArrays, LinearArrays, forward


class Sampling(NamedTuple):
    """How an action comes from an actor's outputs: as in `BoundedNormal`, or as in one `UnimixCategorical`."""

    is_normal: bool
    unimix: float = 0.0
    min_std: float = 0.0
    max_std: float = 0.0


class PolicyArrays(NamedTuple):
    """An actor's layers, with room for what is kept of all its rows, step after step."""

    layers: tuple[LayerArrays, ...]  # padded
    last: LinearArrays
    depth: int
    eps: float
    kept: tuple[Kept, ...]  # padded
    outputs: Array
    sampling: Sampling


@kernel
def dream_step(
    weights: Any, features: Any, action: Any, noise: Any, blocks: Any, classes: Any, unimix: Any, eps: Any,
    following: Any,
) -> None:  # fmt: skip
    """From the features of a step, [rows, D + Z], and the action chosen in it to the `following` ones.

    `weights` are a record as `DreamWeights`, `noise` is exponential, [rows, Z]. The input layers share one norm.
    """
    deter, hidden = weights.deter.shape
    stoch, size = weights.stoch.shape[0], action.shape[1]
    inputs, bounded = np.empty((MOST_ROWS, 3, hidden), np.float32), np.empty((MOST_ROWS, size), np.float32)
    core, gates = np.empty((MOST_ROWS, deter), np.float32), np.empty((MOST_ROWS, 3 * deter), np.float32)
    layers, logits = np.empty((2, MOST_ROWS, hidden), np.float32), np.empty((2, MOST_ROWS, stoch), np.float32)
    for first in range(0, len(features), MOST_ROWS):
        end = min(first + MOST_ROWS, len(features))
        rows, before, after = end - first, features[first:end], following[first:end]
        for i in range(rows):
            for j in range(size):
                bounded[i, j] = action[first + i, j] / max(abs(action[first + i, j]), ONE)
        # The deterministic path.
        product(before[:, :deter], weights.deter, inputs[:rows, 0])
        product(before[:, deter:], weights.stoch, inputs[:rows, 1])
        product(bounded[:rows], weights.action, inputs[:rows, 2])
        norm_silu(inputs[:rows].reshape(-1, hidden), weights.inputs_bias, weights.inputs_scale, eps)
        product(inputs[:rows].reshape(rows, -1), weights.inputs, core[:rows])
        add_block_product(before, weights.block, core[:rows])
        norm_silu(core[:rows], weights.core_bias, weights.core_scale, eps)
        set_rows(gates[:rows], weights.gates_bias)
        add_block_product(core[:rows], weights.gates, gates[:rows])
        gated_update(gates[:rows].reshape(rows, blocks, 3, -1), before, after)
        # A sample of the prior.
        product(after[:, :deter], weights.prior[0], layers[0, :rows])
        norm_silu(layers[0, :rows], weights.prior_bias[0], weights.prior_scale[0], eps)
        for number in range(1, len(weights.prior)):
            own, last = layers[number % 2, :rows], layers[(number + 1) % 2, :rows]
            product(last, weights.prior[number], own)
            norm_silu(own, weights.prior_bias[number], weights.prior_scale[number], eps)
        product(layers[(len(weights.prior) + 1) % 2, :rows], weights.logits, logits[0, :rows])
        for i in range(rows):
            for j in range(stoch):
                logits[0, i, j] += weights.logits_bias[j]
        clocks, sample = noise[first:end].reshape(-1, classes), logits[1, :rows].reshape(-1, classes)
        sample_one_hot(logits[0, :rows].reshape(-1, classes), clocks, unimix, sample)
        after[:, deter:] = logits[1, :rows]


@part
def _sample_action(outputs: Any, noise: Any, sampling: Any, action: Any) -> None:
    if not sampling.is_normal:
        sample_one_hot(outputs, noise, sampling.unimix, action)
        return
    rows, size = action.shape
    least, more = np.float32(sampling.min_std), np.float32(sampling.max_std - sampling.min_std)
    for i in range(rows):
        for j in range(size):
            deviation = more * sigmoid(outputs[i, size + j] + TWO) + least
            action[i, j] = tanh(outputs[i, j]) + deviation * noise[i, j]


@kernel
def dream(
    weights: Any, policy: Any, noise: Any, action_noise: Any, blocks: Any, classes: Any, unimix: Any, eps: Any,
    features: Any, actions: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """From `features[0]` to those of all steps and the actions between them. `policy`: as `PolicyArrays`. `first` and
    `end` say which rows a call is about."""
    steps, rows = noise.shape[:2]
    for start in range(first, end, MOST_ROWS):
        stop = min(start + MOST_ROWS, end)
        for t in range(steps):
            at, chosen = t * rows, actions[t, start:stop]
            forward(
                features[t], policy.layers, policy.last, policy.depth, policy.eps, policy.kept, True, at,
                policy.outputs, start, stop,
            )  # fmt: skip
            _sample_action(policy.outputs[at + start : at + stop], action_noise[t, start:stop], policy.sampling, chosen)
            dream_step(
                weights, features[t, start:stop], chosen, noise[t, start:stop], blocks, classes, unimix, eps,
                features[t + 1, start:stop],
            )  # fmt: skip

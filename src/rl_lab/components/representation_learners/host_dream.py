"""The weights of the block RSSM for dreams on the CPU in float32, where nothing needs a gradient: `dream_kernel` is
`BlockRSSM.predict_step` with them. The part of the core layer that all blocks see is one product."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from rl_lab.nn.host_mlp import Array
from rl_lab.nn.layer_kernels import SMALL, is_small
from rl_lab.nn.layers import MLP, BlockLinear, Linear, NormedLinear, RMSNorm


class DreamWeights(NamedTuple):
    """The weights as they are now, laid out for `x @ weight`. Symbols: see `posterior_scan`; A: of an action."""

    deter: Array  # [D, U]
    stoch: Array  # [Z, U]
    action: Array  # [A, U]
    inputs_bias: Array  # [3, U] of these layers
    inputs_scale: Array  # [3, U]
    block: Array  # [G, d, d] deter → core, block by block
    inputs: Array  # [3U, D] input layers → core, shared by all blocks
    core_bias: Array  # [1, D]
    core_scale: Array  # [1, D]
    gates: Array  # [G, d, 3d]
    gates_bias: Array  # [3D]
    prior: tuple[Array, ...]  # of each hidden layer of the prior, [inputs, U]
    prior_bias: tuple[Array, ...]  # [1, U]
    prior_scale: tuple[Array, ...]  # [1, U]
    logits: Array  # [U, Z]
    logits_bias: Array  # [Z]

    @classmethod
    def of(
        cls, *, layers: list[NormedLinear], core: BlockLinear, core_norm: RMSNorm, gates: BlockLinear,
        prior_layers: MLP, prior_logits: Linear,
    ) -> DreamWeights | None:  # fmt: skip
        """`layers`: those of deter, stoch and action. None where they are not small enough for the kernel: then nothing
        is laid out."""
        priors = [layer for layer in prior_layers if isinstance(layer, NormedLinear)]
        deter, inputs = core.out_features, sum(layer.linear.out_features for layer in layers)
        matrices = [layer.linear.weight for layer in (*layers, *priors)]
        if not priors or inputs * deter > SMALL or not is_small(*matrices, gates.weight, prior_logits.weight):
            return None
        weight, own = _array(core.weight), deter // core.blocks
        return cls(
            deter=_transposed(layers[0].linear),
            stoch=_transposed(layers[1].linear),
            action=_transposed(layers[2].linear),
            inputs_bias=np.stack([_array(layer.linear.bias) for layer in layers]),
            inputs_scale=np.stack([_array(layer.norm.weight) for layer in layers]),
            block=np.ascontiguousarray(weight[:, :own]),
            inputs=np.ascontiguousarray(weight[:, own:].swapaxes(0, 1)).reshape(-1, deter),
            core_bias=_array(core.bias)[None],
            core_scale=_array(core_norm.weight)[None],
            gates=_array(gates.weight),
            gates_bias=_array(gates.bias),
            prior=tuple(_transposed(layer.linear) for layer in priors),
            prior_bias=tuple(_array(layer.linear.bias)[None] for layer in priors),
            prior_scale=tuple(_array(layer.norm.weight)[None] for layer in priors),
            logits=_transposed(prior_logits),
            logits_bias=_array(prior_logits.bias),
        )


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy()


def _transposed(layer: Linear) -> Array:
    return np.ascontiguousarray(_array(layer.weight).T)

"""The deterministic path of the block RSSM on the CPU, where nothing needs a gradient.

`BlockRSSM.advance` with fewer operations and passes over memory: the input layers share one norm, the part of the core
layer that all blocks see is one product, and each gate lies by itself instead of block by block.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.representation_learners.base import LatentState
from rl_lab.components.representation_learners.host_loops import block_product
from rl_lab.nn.host_products import affine
from rl_lab.nn.layers import BlockLinear, NormedLinear, RMSNorm
from rl_lab.nn.normed_layers import normalize_


class HostRecurrence:
    """Fills in the deter of `states` [steps, rows, size], step by step. Made anew for every dream, from the weights as
    they are then."""

    def __init__(
        self,
        states: LatentState,
        layers: list[NormedLinear],
        core: BlockLinear,
        core_norm: RMSNorm,
        gates: BlockLinear,
    ) -> None:
        """`layers`: those of deter, stoch and action."""
        blocks, block, self._eps = core.blocks, core.out_features // core.blocks, core_norm.eps
        self._scales, self._core_scale = torch.stack([layer.norm.weight for layer in layers]), core_norm.weight
        self._block_weight = core.weight[:, :block].numpy()
        self._shared_weight = core.weight[:, block:].transpose(0, 1).reshape(-1, core.out_features)
        self._core_bias = core.bias
        # (reset | candidate | update), each with all its blocks.
        self._gates_weight = gates.weight.view(blocks, block, 3, block).permute(2, 0, 1, 3).contiguous().numpy()
        offset = core.bias.new_tensor([0.0, 0.0, -1.0]).view(3, 1, 1)
        self._gates_bias = gates.bias.view(blocks, 3, block).transpose(0, 1).reshape(3, 1, -1) + offset
        # Every step writes to the same places; `arrays` are those that NumPy works on.
        self._deter, self._stoch, self._deter_array = states.deter.unbind(), states.stoch.unbind(), states.deter.numpy()
        rows = states.deter.shape[1]
        inputs = core.bias.new_empty(rows, *self._scales.shape)
        self._inputs, self._flat_inputs = inputs, inputs.view(rows, -1)
        work = core.bias.new_empty(5, rows, core.out_features)
        self._core, self._own, self._gates = work[0], work[1], work[2:]
        self._arrays = self._core.numpy(), self._own.numpy(), self._gates.numpy()
        self._layers = [
            (layer.linear.bias, layer.linear.weight.detach().t(), place)
            for layer, place in zip(layers, inputs.unbind(1), strict=True)
        ]

    def advance(self, t: int, action: Tensor) -> Tensor:
        """The deter of step t + 1."""
        deter, core, (core_array, own_array, gates_array) = self._deter[t], self._core, self._arrays
        action = action / action.abs().clamp_min_(1.0)
        for x, (bias, weight, place) in zip((deter, self._stoch[t], action), self._layers, strict=True):
            affine(x, weight, bias, out=place)
        normalize_(self._inputs, self._eps)
        F.silu(self._inputs.mul_(self._scales), inplace=True)
        affine(self._flat_inputs, self._shared_weight, self._core_bias, out=core)
        block_product(self._deter_array[t], self._block_weight, out=own_array)
        normalize_(core.add_(self._own), self._eps)
        F.silu(core.mul_(self._core_scale), inplace=True)
        block_product(core_array, self._gates_weight, out=gates_array)
        reset, candidate, update = self._gates.add_(self._gates_bias).unbind()
        candidate.mul_(reset.sigmoid_())
        np.tanh(gates_array[1], out=gates_array[1])  # torch's takes several times as long
        return torch.lerp(deter, candidate, update.sigmoid_(), out=self._deter[t + 1])

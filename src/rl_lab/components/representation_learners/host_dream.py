"""The deterministic path of the block RSSM on the CPU, where nothing needs a gradient.

`BlockRSSM.advance` with fewer operations and passes over memory: the input layers share one norm, the part of the core
layer that all blocks see is one product, and each gate lies by itself instead of block by block.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.representation_learners.host_loops import block_product
from rl_lab.nn.layers import BlockLinear, NormedLinear, RMSNorm
from rl_lab.nn.normed_layers import normalize_


class HostRecurrence:
    """For so many rows at once. Made anew for every dream, from the weights as they are then."""

    def __init__(
        self, rows: int, layers: list[NormedLinear], core: BlockLinear, core_norm: RMSNorm, gates: BlockLinear
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
        # Every step writes to the same places.
        new = core.bias.new_empty
        self._inputs, self._core = new(rows, *self._scales.shape), new(rows, core.out_features)
        self._own, self._gates = torch.empty_like(self._core), new(3, rows, core.out_features)
        self._layers = [
            (layer.linear.bias, layer.linear.weight.t(), self._inputs[:, place]) for place, layer in enumerate(layers)
        ]

    def advance(self, deter: Tensor, stoch: Tensor, action: Tensor, *, out: Tensor) -> None:
        """The next deter, into `out`."""
        action = action / action.abs().clamp_min_(1.0)
        for x, (bias, weight, place) in zip((deter, stoch, action), self._layers, strict=True):
            torch.addmm(bias, x, weight, out=place)
        normalize_(self._inputs, self._eps)
        inputs, core = F.silu(self._inputs.mul_(self._scales), inplace=True), self._core
        torch.addmm(self._core_bias, inputs.view(len(core), -1), self._shared_weight, out=core)
        block_product(deter.numpy(), self._block_weight, out=self._own.numpy())
        normalize_(core.add_(self._own), self._eps)
        F.silu(core.mul_(self._core_scale), inplace=True)
        block_product(core.numpy(), self._gates_weight, out=self._gates.numpy())
        reset, candidate, update = self._gates.add_(self._gates_bias)
        candidate.mul_(reset.sigmoid_())
        np.tanh(candidate.numpy(), out=candidate.numpy())  # torch's takes several times as long
        torch.lerp(deter, candidate, update.sigmoid_(), out=out)

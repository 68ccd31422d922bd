"""Dreams of the block RSSM on the CPU in float32, where nothing needs a gradient.

`BlockRSSM.predict_step` with fewer operations and passes over memory: the input layers share one norm, the part of the
core layer that all blocks see is one product, and what lies between the products is done in one pass each.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.representation_learners.base import LatentState
from rl_lab.components.representation_learners.host_loops import block_product
from rl_lab.components.representation_learners.posterior_scan import ScanShape
from rl_lab.nn import host_kernels as kernels
from rl_lab.nn.host_products import laid_out, multiply
from rl_lab.nn.layers import MLP, BlockLinear, Linear, NormedLinear, RMSNorm


class HostDream:
    """Fills in the features of a dream, step by step. Made anew for every dream, from the weights as they are then."""

    def __init__(
        self,
        start: LatentState,
        steps: int,
        *,
        layers: list[NormedLinear],
        core: BlockLinear,
        core_norm: RMSNorm,
        gates: BlockLinear,
        prior_layers: MLP,
        prior_logits: Linear,
        shape: ScanShape,
    ) -> None:
        """`layers`: those of deter, stoch and action."""
        rows, deter = start.deter.shape
        block, self._shape, self._eps = deter // core.blocks, shape, core_norm.eps
        self.features = start.deter.new_empty(steps + 1, rows, deter + start.stoch.shape[1])
        self.states = LatentState(self.features[..., :deter], self.features[..., deter:])
        self.states.deter[0], self.states.stoch[0] = start.deter, start.stoch
        self._whole, self._deter, self._stoch = (part.numpy() for part in (self.features, *self.states[:2]))
        # The weights.
        self._layer_weights = [laid_out(_array(layer.linear.weight).T, rows) for layer in layers]
        self._layer_biases = np.stack([_array(layer.linear.bias) for layer in layers])
        self._layer_scales = np.stack([_array(layer.norm.weight) for layer in layers])
        weight = _array(core.weight)
        self._block_weight = weight[:, :block]
        self._shared_weight = np.ascontiguousarray(weight[:, block:].swapaxes(0, 1)).reshape(-1, deter)
        self._core_bias, self._core_scale = _array(core.bias)[None], _array(core_norm.weight)[None]
        self._gates_weight, self._gates_bias = _array(gates.weight), _array(gates.bias)
        self._prior = prior_layers.on_host(rows)
        self._logits_weight = laid_out(_array(prior_logits.weight).T, rows)
        self._logits_bias = _array(prior_logits.bias)
        # Every step writes to the same places.
        self._inputs = np.empty((rows, *self._layer_scales.shape), np.float32)
        self._core, self._own = np.empty((2, rows, deter), np.float32)
        self._gates = np.empty((rows, 3 * deter), np.float32)
        self._logits, self._sample = np.empty((2, rows, start.stoch.shape[1]), np.float32)

    def step(
        self, t: int, action: Float[np.ndarray, "rows action"], noise: Float[np.ndarray, "rows groups classes"]
    ) -> None:
        """From step t and the action chosen in it to step t + 1."""
        self._advance(t, action / np.maximum(np.abs(action), 1.0))
        logits = multiply(self._prior(self._deter[t + 1]), self._logits_weight, self._logits)
        logits += self._logits_bias
        places = (part.reshape(-1, self._shape.classes) for part in (logits, noise, self._sample))
        kernels.sample_one_hot(next(places), next(places), self._shape.unimix, next(places))
        self._stoch[t + 1] = self._sample

    def _advance(self, t: int, action: Float[np.ndarray, "rows action"]) -> None:
        inputs, core, gates = self._inputs, self._core, self._gates
        rows, _, hidden = inputs.shape
        for number, x in enumerate((self._deter[t], self._stoch[t], action)):
            multiply(x, self._layer_weights[number], inputs[:, number])
        kernels.norm_silu(inputs.reshape(-1, hidden), self._layer_biases, self._layer_scales, self._eps)
        multiply(inputs.reshape(rows, -1), self._shared_weight, core)
        block_product(self._deter[t], self._block_weight, out=self._own)
        core += self._own
        kernels.norm_silu(core, self._core_bias, self._core_scale, self._eps)
        block_product(core, self._gates_weight, out=gates)
        gates += self._gates_bias
        kernels.gated_update(gates.reshape(rows, self._shape.blocks, 3, -1), self._whole[t], self._whole[t + 1])


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()

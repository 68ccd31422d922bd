"""The recurrent state-space model of DreamerV3: a block GRU and a grid of categorical latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.world_models.base import CategoricalModel, LatentState
from rl_lab.nn.distributions import at_least_float32, tanh
from rl_lab.nn.layers import MLP, BlockLinear, Linear, NormedLinear, RMSNorm


class BlockRSSM(CategoricalModel):
    """The deterministic path is a GRU whose large layers are block-diagonal."""

    def __init__(
        self,
        *,
        embed_size: int,
        action_size: int,
        deter: int,
        hidden: int,
        groups: int,
        classes: int,
        blocks: int = 8,
        unimix: float = 0.01,
        prior_layers: int = 2,
    ) -> None:
        super().__init__(groups=groups, classes=classes, unimix=unimix)
        self.deter, self.hidden, self.blocks = deter, hidden, blocks
        self.deter_layer = NormedLinear(deter, hidden)
        self.stoch_layer = NormedLinear(self.stoch_size, hidden)
        self.action_layer = NormedLinear(action_size, hidden)
        self.core = BlockLinear(deter + blocks * 3 * hidden, deter, blocks)
        self.core_norm = RMSNorm(deter)
        self.gates = BlockLinear(deter, 3 * deter, blocks)
        self.posterior_layer = NormedLinear(deter + embed_size, hidden)
        self.posterior_logits = Linear(hidden, self.stoch_size)
        self.prior_layers = MLP(deter, hidden, prior_layers)
        self.prior_logits = Linear(hidden, self.stoch_size)

    def advance(self, state: LatentState, action: Float[Tensor, "b action"]) -> tuple[Tensor, None]:
        """h' = (1 - u)·h + u·tanh(σ(r)·c), u = σ(u - 1), with r, c, u from two block-diagonal layers of [h, z, a].

        Every block sees its own part of h and the same summary of h, z and a.
        """
        action = action / action.abs().clamp_min(1.0).detach()
        parts = [self.deter_layer(state.deter), self.stoch_layer(state.stoch), self.action_layer(action)]
        summary = torch.cat(parts, -1)
        own = self._to_blocks(state.deter).to(summary.dtype)
        inputs = torch.cat([own, summary.expand(self.blocks, *summary.shape)], -1)
        core = self.activate(self.core_norm(self._from_blocks(self.core.forward_blocks(inputs))))
        gates = self.gates.forward_blocks(self._to_blocks(core)).unflatten(-1, (3, -1))
        reset, candidate, update = at_least_float32(gates).permute(2, 1, 0, 3).flatten(2).unbind()
        candidate = tanh(torch.sigmoid(reset) * candidate)
        deter = torch.lerp(at_least_float32(state.deter), candidate, torch.sigmoid(update - 1.0))
        return deter.to(core.dtype), None

    def activate(self, x: Tensor) -> Tensor:
        """The activation of the GRU's core layer."""
        return F.silu(x)

    def prior(self, deter: Float[Tensor, "*lead deter"]) -> Float[Tensor, "*lead groups classes"]:
        return self.grid(self.prior_logits(self.prior_layers(deter)))

    def posterior(self, deter: Float[Tensor, "*lead deter"], embed: Tensor) -> Float[Tensor, "*lead groups classes"]:
        return self.grid(self.posterior_logits(self.posterior_layer(torch.cat([deter, embed.to(deter.dtype)], -1))))

    def _to_blocks(self, x: Float[Tensor, "b features"]) -> Float[Tensor, "blocks b own"]:
        return x.view(x.shape[0], self.blocks, -1).transpose(0, 1)

    def _from_blocks(self, x: Float[Tensor, "blocks b own"]) -> Float[Tensor, "b features"]:
        return x.transpose(0, 1).reshape(x.shape[1], -1)

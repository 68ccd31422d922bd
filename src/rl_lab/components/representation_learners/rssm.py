"""The recurrent state-space model of DreamerV3: a block GRU and a grid of categorical latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from rl_lab.components.representation_learners.base import (
    CategoricalModel,
    Dream,
    KernelPolicy,
    LatentState,
    Policy,
)
from rl_lab.components.representation_learners.host_dream import DreamWeights
from rl_lab.components.representation_learners.host_loops import HostLoops, host_outside_gradients
from rl_lab.components.representation_learners.posterior_scan import (
    NORM_EPS,
    PosteriorScan,
    ScanFunctions,
    ScanInputs,
    ScanShape,
    ScanWeights,
    StepLoops,
    backward_step,
    forward_step,
    gated_update,
    outside_gradients,
)
from rl_lab.nn.capture import compile_block
from rl_lab.nn.dream_kernel import dream, dream_step
from rl_lab.nn.host_threads import FEW, share_rows
from rl_lab.nn.layers import MLP, BlockLinear, Linear, NormedLinear, RMSNorm
from rl_lab.nn.math import at_least_float32, in_float32_on_host


class BlockRSSM(CategoricalModel):
    """The deterministic path is a GRU whose large layers are block-diagonal. `observe` is a scan with a backward pass
    of its own; `observe_step` is the plain form of the same recurrence."""

    shares_rows = True

    def __init__(
        self,
        *,
        embed_size: int,
        action_size: int,
        deter: int,
        hidden: int,
        groups: int = 32,
        classes: int = 32,
        blocks: int = 8,
        unimix: float = 0.01,
        prior_layers: int = 2,
    ) -> None:
        super().__init__(groups=groups, classes=classes, unimix=unimix)
        self.deter, self.hidden = deter, hidden
        self.scan_shape = ScanShape(blocks, groups, classes, unimix)
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
        # The first that suits is taken.
        self._scans = [ScanFunctions(HostLoops(), host_outside_gradients), ScanFunctions()]

    def compile_steps(self, dtype: torch.dtype = torch.float32) -> None:
        super().compile_steps(dtype)
        steps = StepLoops(compile_block(forward_step), compile_block(backward_step))
        compiled = ScanFunctions(steps, compile_block(outside_gradients))
        self._scans = [compiled]
        if self.core.bias.is_cuda:
            from rl_lab.components.representation_learners.kernel_loops import KernelLoops, backward_tables

            loops = KernelLoops(compile_block(backward_tables))
            self._scans.insert(0, compiled._replace(loops=loops))

    def fuse(self) -> bool:
        return self.prior_layers.fuse()

    @torch.no_grad()
    def rehearse(self, batch: int, dtype: torch.dtype) -> None:
        from rl_lab.components.representation_learners.kernel_loops import KernelLoops

        weights, *_ = self._scan_weights(dtype)
        if KernelLoops.fit(weights):
            KernelLoops().rehearse(weights, self.scan_shape, batch)

    # One step at a time -----------------------------------------------------------------------------------------------

    def advance(self, state: LatentState, action: Float[Tensor, "b action"]) -> tuple[Tensor, None]:
        action = action / action.abs().clamp_min(1.0).detach()
        inputs = [self.deter_layer(state.deter), self.stoch_layer(state.stoch), self.action_layer(action)]
        shared = torch.cat(inputs, -1)
        blocks = self.core.blocks
        own = state.deter.to(shared.dtype).view(shared.shape[0], blocks, -1)
        each = torch.cat([own, shared.unsqueeze(1).expand(-1, blocks, -1)], -1)
        core = F.silu(self.core_norm(self.core(each.flatten(1))))
        return gated_update(self.gates(core), state.deter, blocks).to(core.dtype), None

    def prior(self, deter: Float[Tensor, "*lead deter"]) -> Float[Tensor, "*lead groups classes"]:
        return self.grid(self.prior_logits(self.prior_layers(deter)))

    def posterior(self, deter: Float[Tensor, "*lead deter"], embed: Tensor) -> Float[Tensor, "*lead groups classes"]:
        return self.grid(self.posterior_logits(self.posterior_layer(torch.cat([deter, embed.to(deter.dtype)], -1))))

    # Whole sequences --------------------------------------------------------------------------------------------------

    def observe(
        self,
        embed: Float[Tensor, "b t embed"],
        prev_action: Float[Tensor, "b t action"],
        is_first: Bool[Tensor, "b t"],
        initial: LatentState,
        noise: Float[Tensor, "t b groups classes"] | None = None,
    ) -> tuple[LatentState, Float[Tensor, "b t groups classes"]]:
        """Filter sequences: (posterior states, posterior logits), batch first."""
        dtype = embed.dtype
        if noise is None:
            noise = self.draw_noise(embed.shape[1::-1], embed.device)
        keep = (~is_first).t().unsqueeze(-1)
        action = (prev_action.transpose(0, 1) * keep).to(dtype)
        with torch.autocast(embed.device.type, enabled=False):
            weights, action_weight, embed_weight = self._scan_weights(dtype)
            action = action / action.abs().clamp_min(1.0)
            action = self._cast_normed(self.action_layer, action, dtype)
            action_part = action @ action_weight + self.core.bias.to(dtype)
            bias = self.posterior_layer.linear.bias.to(dtype)
            embed_part = F.linear(embed.transpose(0, 1), embed_weight.to(dtype), bias)
            inputs = ScanInputs(
                initial.deter.to(dtype), initial.stoch.to(dtype), keep.to(at_least_float32(embed).dtype),
                action_part, embed_part, noise,
            )  # fmt: skip
            functions = next(functions for functions in self._scans if functions.loops.suit(inputs, weights))
            deter, stoch, logits = PosteriorScan.apply(functions, self.scan_shape, *inputs, *weights)
        states = LatentState(deter.transpose(0, 1), stoch.transpose(0, 1))
        return states, self.grid(logits.transpose(0, 1))

    def imagine(
        self,
        start: LatentState,
        policy: Policy,
        *,
        latent_noise: Float[Tensor, "horizon b groups classes"],
        action_noise: Float[Tensor, "horizon b *action"],
    ) -> Dream:
        """Roll the prior forward. Without gradients on the CPU small models do so in kernels, and threads share the
        rows."""
        weights = None
        if not torch.is_grad_enabled() and in_float32_on_host(start.deter):
            weights = DreamWeights.of(
                layers=[self.deter_layer, self.stoch_layer, self.action_layer], core=self.core,
                core_norm=self.core_norm, gates=self.gates, prior_layers=self.prior_layers,
                prior_logits=self.prior_logits,
            )  # fmt: skip
        if weights is None:
            return super().imagine(start, policy, latent_noise=latent_noise, action_noise=action_noise)
        steps, rows = latent_noise.shape[:2]
        features = start.deter.new_empty(steps + 1, rows, self.feature_size)
        actions = start.deter.new_empty(steps, rows, len(weights.action))
        states = LatentState(features[..., : self.deter], features[..., self.deter :])
        states.deter[0], states.stoch[0] = start.deter, start.stoch
        noise, (blocks, _, classes, unimix) = latent_noise.flatten(2).numpy(), self.scan_shape
        numbers, seen, taken = (blocks, classes, unimix, NORM_EPS), features.numpy(), actions.numpy()
        network = policy.arrays() if isinstance(policy, KernelPolicy) else None
        if network is not None:
            given = (weights, network, noise, action_noise.numpy(), *numbers, seen, taken)
            share_rows(lambda first, end: dream(*given, first, end), rows, least=FEW)
        else:
            for t, (feature, draw) in enumerate(zip(features[:-1].unbind(), action_noise.unbind(), strict=True)):
                taken[t] = policy(feature, draw).numpy()
                dream_step(weights, seen[t], taken[t], noise[t], *numbers, seen[t + 1])
        return Dream(states, features, actions)

    # Helpers ----------------------------------------------------------------------------------------------------------

    def _cast_normed(self, layer: NormedLinear, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.silu(layer.norm(F.linear(x, layer.linear.weight.to(dtype), layer.linear.bias.to(dtype))))

    def _scan_weights(self, dtype: torch.dtype) -> tuple[ScanWeights, Tensor, Tensor]:
        """The recurrent weights in the scan's layout and dtype; the action's share of the core layer, and the share of
        what is seen in the posterior's. Shares are split off together: so their gradients come back as one tensor."""
        posterior = self.posterior_layer.linear.weight
        own, shared = self.core.weight.split([self.deter // self.core.blocks, 3 * self.hidden], 1)
        from_deter, from_embed = posterior.split([self.deter, posterior.shape[1] - self.deter], 1)
        inputs, action = (
            shared.permute(1, 0, 2).reshape(3 * self.hidden, self.deter).to(dtype).tensor_split([2 * self.hidden])
        )
        dense = torch.cat([from_deter, self.deter_layer.linear.weight])
        weights = ScanWeights(
            block=own.to(dtype),
            dense=dense.t().to(dtype),
            stoch=self.stoch_layer.linear.weight.t().to(dtype),
            inputs=inputs,
            gates=self.gates.weight.to(dtype),
            gates_bias=self.gates.bias.to(dtype),
            logits=self.posterior_logits.weight.t().to(dtype),
            logits_bias=self.posterior_logits.bias.to(dtype),
            inputs_bias=torch.cat([self.deter_layer.linear.bias, self.stoch_layer.linear.bias]),
            inputs_norm=torch.cat([self.deter_layer.norm.weight, self.stoch_layer.norm.weight]),
            core_norm=self.core_norm.weight,
            posterior_norm=self.posterior_layer.norm.weight,
        )
        return weights, action, from_embed

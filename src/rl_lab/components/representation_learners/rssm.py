"""The recurrent state-space model of DreamerV3: a block GRU and a grid of categorical latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.components.representation_learners.posterior_scan import (
    PosteriorScan,
    ScanFunctions,
    ScanShape,
    ScanWeights,
    backward_step,
    forward_step,
    gated_update,
)
from rl_lab.nn.capture import compile_block
from rl_lab.nn.distributions import UnimixCategorical
from rl_lab.nn.layers import MLP, BlockLinear, Linear, NormedLinear, RMSNorm
from rl_lab.nn.math import at_least_float32


class LatentState(NamedTuple):
    """h and z. `stoch` is the flat one-hots of all groups."""

    deter: Float[Tensor, "*lead deter"]
    stoch: Float[Tensor, "*lead stoch"]

    @property
    def features(self) -> Float[Tensor, "*lead features"]:
        return torch.cat([self.deter, self.stoch], -1)

    def detach(self) -> LatentState:
        return LatentState(self.deter.detach(), self.stoch.detach())

    def flatten(self) -> LatentState:
        """[a, b, size] → [a·b, size]"""
        return LatentState(self.deter.flatten(0, 1), self.stoch.flatten(0, 1))


class Dream(NamedTuple):
    """An imagined rollout, time first: state t, and the action chosen in it. There is one state more than actions."""

    states: LatentState  # [horizon + 1, batch, size]
    actions: Float[Tensor, "horizon batch action"]


class BlockRSSM(nn.Module):
    """h_t = f(h_{t-1}, z_{t-1}, a_{t-1});  prior p(z_t | h_t);  posterior q(z_t | h_t, e_t).

    `prev_action[:, t]` is the (encoded) action that led to `embed[:, t]`. Where `is_first[:, t]`, the state and the
    action before t are taken as zeros. Posteriors and priors are logits [*lead, groups, classes].
    """

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
        super().__init__()
        self.deter, self.hidden, self.groups, self.classes, self.unimix = deter, hidden, groups, classes, unimix
        self.stoch_size = groups * classes
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
        self._scan_functions = ScanFunctions()
        self._imagine_step: Callable[..., tuple[LatentState, Tensor]] = self._plain_imagine_step

    @property
    def feature_size(self) -> int:
        return self.deter + self.stoch_size

    def compile_steps(self) -> None:
        """Compile one step of each loop."""
        self._scan_functions = ScanFunctions(compile_block(forward_step), compile_block(backward_step))
        self._imagine_step = compile_block(self._plain_imagine_step)

    # One step at a time -----------------------------------------------------------------------------------------------

    def initial(self, batch: int) -> LatentState:
        zeros = self.core.bias.new_zeros  # follows the module across devices
        return LatentState(zeros(batch, self.deter), zeros(batch, self.stoch_size))

    def step_deter(self, state: LatentState, action: Float[Tensor, "b action"]) -> Float[Tensor, "b deter"]:
        """f: the deterministic path."""
        action = action / action.abs().clamp_min(1.0).detach()
        inputs = [self.deter_layer(state.deter), self.stoch_layer(state.stoch), self.action_layer(action)]
        shared = torch.cat(inputs, -1)
        blocks = self.core.blocks
        own = state.deter.to(shared.dtype).view(shared.shape[0], blocks, -1)
        each = torch.cat([own, shared.unsqueeze(1).expand(-1, blocks, -1)], -1)
        core = F.silu(self.core_norm(self.core(each.flatten(1))))
        gates = self.gates.forward_blocks(core.view(core.shape[0], blocks, -1).transpose(0, 1))
        return gated_update(gates, state.deter).to(core.dtype)

    def prior(self, deter: Float[Tensor, "*lead deter"]) -> Float[Tensor, "*lead groups classes"]:
        return self._grid(self.prior_logits(self.prior_layers(deter)))

    def posterior(self, deter: Float[Tensor, "*lead deter"], embed: Tensor) -> Float[Tensor, "*lead groups classes"]:
        return self._grid(self.posterior_logits(self.posterior_layer(torch.cat([deter, embed.to(deter.dtype)], -1))))

    def categorical(self, logits: Float[Tensor, "*lead groups classes"]) -> UnimixCategorical:
        return UnimixCategorical(logits, unimix=self.unimix)

    def observe_step(
        self, state: LatentState, prev_action: Tensor, embed: Tensor, noise: Tensor | None = None
    ) -> tuple[LatentState, Tensor]:
        """One filtering step; the caller zeroes state and action at an episode's start."""
        deter = self.step_deter(state, prev_action)
        logits = self.posterior(deter, embed)
        return LatentState(deter, self._sample(logits, noise, deter.dtype)), logits

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
            noise = torch.empty(*embed.shape[1::-1], self.groups, self.classes, device=embed.device).exponential_()
        keep = (~is_first).t().unsqueeze(-1)
        action = (prev_action.transpose(0, 1) * keep).to(dtype)
        with torch.autocast(embed.device.type, enabled=False):
            weights, action_weight = self._scan_weights(dtype)
            action = action / action.abs().clamp_min(1.0)
            action = self._cast_normed(self.action_layer, action, dtype)
            action_part = action @ action_weight + self.core.bias.to(dtype)
            embed_part = F.linear(
                embed.transpose(0, 1),
                self.posterior_layer.linear.weight[:, self.deter :].to(dtype),
                self.posterior_layer.linear.bias.to(dtype),
            )
            deter, stoch, logits = PosteriorScan.apply(
                self._scan_functions, self.scan_shape, initial.deter.to(dtype), initial.stoch.to(dtype),
                keep.to(at_least_float32(embed).dtype), action_part, embed_part, noise, *weights,
            )  # fmt: skip
        states = LatentState(deter.transpose(0, 1), stoch.transpose(0, 1))
        return states, self._grid(logits.transpose(0, 1))

    def imagine(
        self,
        start: LatentState,
        policy: Callable[[Tensor, Tensor], Tensor],
        *,
        latent_noise: Float[Tensor, "horizon b groups classes"],
        action_noise: Float[Tensor, "horizon b noise"],
    ) -> Dream:
        """Roll the prior forward: `policy(features, noise)` chooses each action."""
        states, actions = [start], []
        for step_latent_noise, step_action_noise in zip(latent_noise, action_noise, strict=True):
            state, action = self._imagine_step(states[-1], policy, step_latent_noise, step_action_noise)
            states.append(state)
            actions.append(action)
        deter, stoch = (torch.stack(parts) for parts in zip(*states, strict=True))
        return Dream(LatentState(deter, stoch), torch.stack(actions))

    def imagine_actions(self, start: LatentState, actions: Float[Tensor, "b t action"]) -> LatentState:
        """Roll the prior forward under given actions: the states they lead to, batch first."""
        state, states = start, []
        for action in actions.unbind(1):
            deter = self.step_deter(state, action)
            state = LatentState(deter, self._sample(self.prior(deter), None, deter.dtype))
            states.append(state)
        return LatentState(*(torch.stack(parts, 1) for parts in zip(*states, strict=True)))

    def _plain_imagine_step(
        self, state: LatentState, policy: Callable[[Tensor, Tensor], Tensor], latent_noise: Tensor, action_noise: Tensor
    ) -> tuple[LatentState, Tensor]:
        action = policy(state.features, action_noise)
        deter = self.step_deter(state, action.to(state.deter.dtype))
        return LatentState(deter, self._sample(self.prior(deter), latent_noise, deter.dtype)), action

    # Helpers ----------------------------------------------------------------------------------------------------------

    def _grid(self, logits: Tensor) -> Tensor:
        return logits.unflatten(-1, (self.groups, self.classes))

    def _sample(self, logits: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.categorical(logits).sample(noise).flatten(-2).to(dtype)

    def _cast_normed(self, layer: NormedLinear, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.silu(layer.norm(F.linear(x, layer.linear.weight.to(dtype), layer.linear.bias.to(dtype))))

    def _scan_weights(self, dtype: torch.dtype) -> tuple[ScanWeights, Tensor]:
        """The recurrent weights in the scan's layout and dtype, and the action's share of the core layer."""
        own = self.deter // self.core.blocks
        shared = self.core.weight[:, own:].permute(1, 0, 2).reshape(3 * self.hidden, self.deter).to(dtype)
        dense = torch.cat([self.posterior_layer.linear.weight[:, : self.deter], self.deter_layer.linear.weight])
        weights = ScanWeights(
            block=self.core.weight[:, :own].to(dtype),
            dense=dense.t().to(dtype),
            stoch=self.stoch_layer.linear.weight.t().to(dtype),
            inputs=shared[: 2 * self.hidden],
            gates=self.gates.weight.to(dtype),
            gates_bias=self.gates.bias.view(self.core.blocks, 1, -1).to(dtype),
            logits=self.posterior_logits.weight.t().to(dtype),
            logits_bias=self.posterior_logits.bias.to(dtype),
            deter_bias=self.deter_layer.linear.bias,
            stoch_bias=self.stoch_layer.linear.bias,
            deter_norm=self.deter_layer.norm.weight,
            stoch_norm=self.stoch_layer.norm.weight,
            core_norm=self.core_norm.weight,
            posterior_norm=self.posterior_layer.norm.weight,
        )
        return weights, shared[2 * self.hidden :]

"""The recurrent state-space models before the block GRU: PlaNet, Dreamer v1, Dreamer v2, and v3 as it was in 2023.

All share one shape: x = act(W[z, a]), h' = GRU(x, h), and a hidden layer each before prior and posterior. What differs
is said by the constructor: the latent, the cell, the style of the layers. docs/rssm.md has them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rl_lab.components.representation_learners.base import (
    CategoricalModel,
    GaussianModel,
    LatentState,
    StateSpaceModel,
    StdForm,
    stack_states,
)
from rl_lab.components.representation_learners.recurrent_cells import CELLS
from rl_lab.nn.capture import compile_block
from rl_lab.nn.layers import Head, NormedLinear
from rl_lab.nn.precision import WorkingCopies
from rl_lab.nn.recorded_loop import RecordedLoop, Step, Tensors
from rl_lab.nn.styles import StyleLike, layer_style

Cell = Literal["reset_before", "reset_after", "layer_norm"]


class Filtering(NamedTuple):
    """A step of `observe` for a `RecordedLoop`."""

    copies: WorkingCopies
    model: DenseModel  # the copy whose weights the loop takes
    step: Step
    replay: Step


class DenseModel(StateSpaceModel):
    """h' = GRU(act(W[z, a]), h);  prior: act(W h) → outputs;  posterior: act(W[h, e]) → outputs."""

    def _build(
        self, *, embed_size: int, action_size: int, deter: int, hidden: int, cell: Cell, style: StyleLike,
        clip_actions: bool, outputs: int | Sequence[int],
    ) -> None:  # fmt: skip
        look = layer_style(style)
        self.deter, self.hidden, self.clip_actions = deter, hidden, clip_actions
        self.input_layer = NormedLinear(self.stoch_size + action_size, hidden, style=look)
        self.cell = CELLS[cell](hidden, deter, look)
        self.prior_head = Head(deter, outputs, units=hidden, layers=1, style=look)
        self.posterior_head = Head(deter + embed_size, outputs, units=hidden, layers=1, style=look)
        self._filtering: Filtering | None = None  # without one, autograd follows the loop

    def compile_steps(self, dtype: torch.dtype = torch.float32) -> None:
        self.record_steps(dtype)
        super().compile_steps(dtype)
        assert self._filtering is not None
        step, replay = compile_block(self._filtering.step), compile_block(self._filtering.replay)
        self._filtering = self._filtering._replace(step=step, replay=replay)

    def record_steps(self, dtype: torch.dtype) -> None:
        """From now on, take the gradients of `observe` by weights for all steps at once. It computes in `dtype`."""
        copies = WorkingCopies(dtype)
        model = copies.add(self)
        self._filtering = Filtering(copies, model, model._recorded_step, self._all_recorded_steps)

    def _params(self, outputs: Float[Tensor, "*lead outputs"]) -> Tensor:
        """Raw outputs in the shape of the latent's parameters."""
        return outputs

    # One step at a time -----------------------------------------------------------------------------------------------

    def advance(self, state: LatentState, action: Float[Tensor, "b action"]) -> tuple[Tensor, None]:
        state = self._entered(state)
        x = self.input_layer(torch.cat([state.stoch, self._bounded(action).to(state.stoch.dtype)], -1))
        return self.cell(x, state.deter), None

    def prior(self, deter: Float[Tensor, "*lead deter"]) -> Tensor:
        return self._params(self.prior_head(deter))

    def posterior(self, deter: Float[Tensor, "*lead deter"], embed: Float[Tensor, "*lead embed"]) -> Tensor:
        return self._params(self.posterior_head(torch.cat([deter, embed.to(deter.dtype)], -1)))

    def _bounded(self, action: Tensor) -> Tensor:
        """With `clip_actions`, a / max(1, |a|)."""
        return action / action.abs().clamp_min(1.0).detach() if self.clip_actions else action

    def _entered(self, state: LatentState) -> LatentState:
        """The state to go on from."""
        return state

    # Whole sequences --------------------------------------------------------------------------------------------------

    def observe(
        self,
        embed: Float[Tensor, "b t embed"],
        prev_action: Float[Tensor, "b t action"],
        is_first: Bool[Tensor, "b t"],
        initial: LatentState,
        noise: Float[Tensor, "t b *latent"] | None = None,
    ) -> tuple[LatentState, Tensor]:
        """Filter sequences. The products with actions and embeddings do not wait for the state: they come first."""
        if noise is None:
            noise = self.draw_noise(embed.shape[1::-1], embed.device)
        keep = (~is_first).to(embed.dtype).unsqueeze(-1)
        inputs, posterior = self.input_layer.linear, self._posterior_layer.linear
        action = self._bounded(prev_action.to(embed.dtype) * keep)
        action_part = F.linear(action, inputs.weight[:, self.stoch_size :], inputs.bias)
        embed_part = F.linear(embed, posterior.weight[:, self.deter :], posterior.bias)
        state = initial.map(lambda part: part.to(embed_part.dtype))
        given = *(part.transpose(0, 1) for part in (keep, action_part, embed_part)), noise
        if self._filtering is not None and torch.is_grad_enabled():
            return self._observe_recorded(self._filtering, state, given)
        weights, states, params = self._state_weights(), [], []
        for step in zip(*given, strict=True):
            state, step_params = self._filter_step(state, *(*step, *weights))
            states.append(state)
            params.append(step_params)
        return stack_states(states, 1), torch.stack(params, 1)

    def _observe_recorded(
        self, filtering: Filtering, initial: LatentState, given: Tensors
    ) -> tuple[LatentState, Tensor]:
        """The steps with a copy of the weights, then all of them at once with the weights themselves.

        The state before the first step gets no gradient.
        """
        filtering.copies.refresh()
        weights = tuple(weight.contiguous() for weight in filtering.model._state_weights())
        loop = RecordedLoop(filtering.step, (initial.deter, initial.stoch))
        for step in zip(*given, strict=True):
            loop.advance((), (*step, *weights))
        results = filtering.replay(*loop.before(), *given, *self._state_weights())
        deter, stoch, params = (part.transpose(0, 1) for part in loop.replayed(*results))
        return LatentState(deter, stoch), params

    def _state_weights(self) -> tuple[Tensor, Tensor]:
        """What z and h are multiplied with in the input layer and the posterior's: the rest is done before the loop.

        Cut once: each cut inside the loop would have a gradient of the whole weight's size.
        """
        inputs, posterior = self.input_layer.linear.weight, self._posterior_layer.linear.weight
        return inputs[:, : self.stoch_size], posterior[:, : self.deter]

    @property
    def _posterior_layer(self) -> NormedLinear:
        layer = self.posterior_head.trunk[0]
        assert isinstance(layer, NormedLinear)
        return layer

    def _recorded_step(self, deter: Tensor, stoch: Tensor, *given: Tensor) -> Tensors:
        """`_filter_step` for a `RecordedLoop`."""
        state, params = self._filter_step(LatentState(deter, stoch), *given)
        return state.deter, state.stoch, state.deter.clone(), state.stoch.clone(), params

    def _all_recorded_steps(self, *arguments: Tensor) -> Tensors:
        """The same for steps [t, b] at once; the last two arguments are weights."""
        lead, weights = arguments[0].shape[:2], arguments[-2:]
        results = self._recorded_step(*(part.flatten(0, 1) for part in arguments[:-2]), *weights)
        return tuple(part.unflatten(0, lead) for part in results)

    def _filter_step(
        self, state: LatentState, keep: Tensor, action_part: Tensor, embed_part: Tensor, noise: Tensor,
        stoch_weight: Tensor, deter_weight: Tensor,
    ) -> tuple[LatentState, Tensor]:  # fmt: skip
        state = self._entered(LatentState(state.deter * keep, state.stoch * keep))
        inputs, posterior = self.input_layer, self._posterior_layer
        x = F.linear(state.stoch, stoch_weight) + action_part
        deter = self.cell(inputs.activate(inputs.norm(x)), state.deter)
        hidden = F.linear(deter, deter_weight) + embed_part
        outputs = self.posterior_head.output(posterior.activate(posterior.norm(hidden)))
        params = self._params(outputs)
        return LatentState(deter, self.sample(params, noise, deter.dtype)), params


class GaussianRSSM(DenseModel, GaussianModel):
    """With normal latents.

    PlaNet: style planet, cell reset_before, separate_std. Dreamer v1: style dreamer_v1, cell reset_after. Both have
    h 200, z 30, hidden layers of 200.
    """

    def __init__(
        self,
        *,
        embed_size: int,
        action_size: int,
        deter: int = 200,
        hidden: int = 200,
        stoch: int = 30,
        cell: Cell = "reset_before",
        style: StyleLike = "planet",
        separate_std: bool = True,  # mean and deviation are layers of their own, or the halves of one
        min_std: float = 0.1,
        std_form: StdForm = "softplus",
        clip_actions: bool = False,
    ) -> None:
        GaussianModel.__init__(self, stoch=stoch, min_std=min_std, std_form=std_form)
        self._build(
            embed_size=embed_size, action_size=action_size, deter=deter, hidden=hidden, cell=cell, style=style,
            clip_actions=clip_actions, outputs=(stoch, stoch) if separate_std else (2 * stoch,),
        )  # fmt: skip


class DenseCategoricalRSSM(DenseModel, CategoricalModel):
    """With a grid of categorical latents.

    Dreamer v2: style dreamer_v2, unimix 0. DreamerV3 in 2023: style dreamer_v3_2023, unimix 0.01, clip_actions,
    learned_initial.
    """

    def __init__(
        self,
        *,
        embed_size: int,
        action_size: int,
        deter: int = 600,
        hidden: int = 600,
        groups: int = 32,
        classes: int = 32,
        unimix: float = 0.0,
        cell: Cell = "layer_norm",
        style: StyleLike = "dreamer_v2",
        clip_actions: bool = False,
        learned_initial: bool = False,  # an episode begins in tanh(parameter) and the prior's mode there, not in zeros
    ) -> None:
        CategoricalModel.__init__(self, groups=groups, classes=classes, unimix=unimix)
        self._build(
            embed_size=embed_size, action_size=action_size, deter=deter, hidden=hidden, cell=cell, style=style,
            clip_actions=clip_actions, outputs=groups * classes,
        )  # fmt: skip
        self.initial_deter = nn.Parameter(torch.zeros(deter)) if learned_initial else None

    def _params(self, outputs: Float[Tensor, "*lead stoch"]) -> Float[Tensor, "*lead groups classes"]:
        return self.grid(outputs)

    def _entered(self, state: LatentState) -> LatentState:
        """An empty memory (no class is chosen) stands for the learned initial state."""
        if self.initial_deter is None:
            return state
        deter = torch.tanh(self.initial_deter).to(state.deter.dtype)
        mode: Any = self.distribution(self.prior(deter)).mode()
        empty = state.stoch.sum(-1, keepdim=True) == 0.0
        stoch = mode.flatten(-2).to(state.stoch.dtype)
        return LatentState(torch.where(empty, deter, state.deter), torch.where(empty, stoch, state.stoch))

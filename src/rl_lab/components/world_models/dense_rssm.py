"""The recurrent state-space models before the block GRU: PlaNet, Dreamer v1, Dreamer v2, and v3 as it was in 2023.

All share one shape: x = act(W[z, a]), h' = GRU(x, h), and a hidden layer each before prior and posterior. What differs
is said by the constructor: the latent, the cell, the style of the layers. docs/rssm.md has them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_lab.components.world_models.base import (
    CategoricalModel,
    GaussianModel,
    LatentState,
    StateSpaceModel,
    StdForm,
)
from rl_lab.components.world_models.recurrent_cells import CELLS
from rl_lab.nn.layers import Head, NormedLinear
from rl_lab.nn.styles import StyleLike, layer_style

Cell = Literal["reset_before", "reset_after", "layer_norm"]


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

    def _params(self, outputs: Float[Tensor, "*lead outputs"]) -> Tensor:
        """Raw outputs in the shape of the latent's parameters."""
        return outputs

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
        deter: int,
        hidden: int,
        stoch: int,
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
        deter: int,
        hidden: int,
        groups: int,
        classes: int,
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

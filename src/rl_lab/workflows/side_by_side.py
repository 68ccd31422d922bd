"""A Dreamer's update on a GPU, with the behaviour learning beside the world model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rl_lab.components.world_models.base import LatentState
from rl_lab.kernels.graphs import Branch, GradientCut
from rl_lab.workflows.world_model import Filtered, Losses, Replayed

if TYPE_CHECKING:
    from rl_lab.workflows.dreamer import Dreamer


def learn_side_by_side(
    dreamer: Dreamer, data: Replayed, branch: Branch
) -> tuple[Tensor, Losses, LatentState, dict[str, Tensor]]:
    """The total loss, and what `Dreamer.losses` returns, after their backward pass.

    World model and behaviour are mostly small kernels, one after another, and leave room for each other. The model's
    gradient waits at its states until all that is computed from them has had its backward pass.
    """
    with dreamer.autocast():
        filtered = dreamer.filter(data)
    branch.fork()
    states = filtered.states
    cut = GradientCut(states.deter, states.stoch, filtered.posterior, filtered.embed)
    deter, stoch, posterior, embed = cut.leaves
    own = Filtered(embed, LatentState(deter, stoch, states.memory), posterior)
    with dreamer.autocast():
        losses, metrics = dreamer.world_model_losses(own, data)
    dreamer.total(losses).backward()
    with branch, dreamer.autocast():
        behaviour = dreamer.behaviour_losses(states.detach(), data)
    branch.join()
    with dreamer.autocast():
        further = dreamer.replay_losses(own.states, data, behaviour)
    if further:
        dreamer.total(further).backward()
    branch.fork()  # the critic has gradients of both sides
    with branch:
        dreamer.total(behaviour.losses).backward()
    cut.backward()
    branch.join()
    losses |= behaviour.losses | further
    return dreamer.total(losses), losses, states, metrics | behaviour.metrics

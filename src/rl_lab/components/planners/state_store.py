"""Model states of the nodes of many trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from rl_lab.simulation.simulator import ModelState, batch_size, map_state


class StateStore:
    """Room for the states of `nodes` nodes of each tree, simulation by simulation.

    A new node's states are one contiguous block, and those of any nodes one `index_select`.
    """

    def __init__(self, state: ModelState, nodes: int) -> None:
        """`state`: that of node 0 in each tree, [trees, ...]."""
        self.trees, self.size = batch_size(state), 1
        self._blocks = map_state(lambda part: _room(part, nodes), state)
        self._rows: Tensor | None = None

    def append(self, state: ModelState) -> None:
        """The states of the next node in each tree."""
        for room, part in zip(_tensors(self._blocks), _tensors(state), strict=True):
            room[self.size] = part
        self.size += 1

    def at(self, node: Int[Tensor, " trees"]) -> ModelState:
        """The state of one node of each tree."""
        if self._rows is None:
            self._rows = torch.arange(self.trees, device=node.device)
        rows = node * self.trees + self._rows
        take: Callable[[Tensor], Tensor] = lambda room: room.flatten(0, 1).index_select(0, rows)  # noqa: E731
        return map_state(take, self._blocks)


def _room(part: Tensor, nodes: int) -> Tensor:
    room = part.new_empty(nodes, *part.shape)
    room[0] = part
    return room


def _tensors(state: ModelState) -> list[Tensor]:
    """The tensors of a model state, in a fixed order."""
    if state is None:
        return []
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, Mapping) else state
    return [tensor for part in parts for tensor in _tensors(part)]

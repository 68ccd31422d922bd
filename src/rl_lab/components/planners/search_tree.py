"""The trees of a batched Monte-Carlo tree search, as arrays [roots, nodes, actions].

Every simulation adds one node to each tree, so node k of each tree was made by simulation k; node 0 is the root. An
edge (node, action) keeps its visit count N and the sum W of the returns that were backed up through it, so Q = W / N
includes the reward of the edge. Values are those of the player to move at a node, in raw reward units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from rl_lab.components.planners.search_rules import SelectionRule

NO_NODE = -1


@dataclass
class Edges:
    """Inputs of a selection rule: the edges of one node of each tree, in float64, and statistics of the node."""

    logits: Float[Tensor, "roots actions"]
    prior: Float[Tensor, "roots actions"]
    visits: Float[Tensor, "roots actions"]
    returns: Float[Tensor, "roots actions"]  # sums
    raw_value: Float[Tensor, " roots"]  # the model's own value of the node
    low: Float[Tensor, " roots"]  # smallest and largest Q of each tree so far
    high: Float[Tensor, " roots"]

    @property
    def q(self) -> Float[Tensor, "roots actions"]:
        """Mean return of each edge; 0 where it was never taken."""
        return self.returns / self.visits.clamp(min=1.0)

    @property
    def value(self) -> Float[Tensor, " roots"]:
        """Mean of the node's own value and of all returns backed up through it."""
        return (self.raw_value + self.returns.sum(-1)) / (1.0 + self.visits.sum(-1))


class SearchTree:
    """`select` walks every tree down to an edge without a child; `expand` adds that child and backs its value up."""

    def __init__(
        self,
        *,
        logits: Float[Tensor, "roots actions"],
        value: Float[Tensor, " roots"],
        simulations: int,
        legal: Bool[Tensor, "roots actions"] | None = None,
        prior: Float[Tensor, "roots actions"] | None = None,  # of the root, where it is not softmax(logits): with noise
        bounds: tuple[float, float] | None = None,  # known range of Q; None: the range seen in each tree
    ) -> None:
        roots, actions = logits.shape
        shape = (roots, simulations + 1)
        self.roots, self.actions, self.simulations, self.size = roots, actions, simulations, 1
        self.logits, self.prior, self.returns = logits.new_zeros(3, *shape, actions)
        self.child = torch.full((*shape, actions), NO_NODE, dtype=torch.int32, device=logits.device)
        self.visits = torch.zeros_like(self.child)
        self.value, self.reward, self.discount = logits.new_zeros(3, *shape)  # the last two: of the edge to a node
        self.parent, self.parent_action = torch.full((2, *shape), NO_NODE, dtype=torch.int32, device=logits.device)
        self.fixed_bounds = bounds is not None
        low, high = bounds or (torch.inf, -torch.inf)
        self.low, self.high = logits.new_full((roots,), low), logits.new_full((roots,), high)
        self.legal = torch.ones_like(logits, dtype=torch.bool) if legal is None else legal
        self.rows = torch.arange(roots, device=logits.device)
        self.logits[:, 0], self.value[:, 0] = logits, value
        self.prior[:, 0] = torch.softmax(logits, -1) if prior is None else prior

    # One simulation ---------------------------------------------------------------------------------------------------

    def select(self, rule: SelectionRule) -> tuple[Int[Tensor, " roots"], Int[Tensor, " roots"]]:
        """(node, action) of the edge to expand in each tree. On a GPU nothing is read back: the walk then takes as
        many steps as a tree can be deep."""
        node, action = torch.zeros_like(self.rows), rule.root(self.edges(torch.zeros_like(self.rows)), self.legal)
        walking = torch.ones_like(self.rows, dtype=torch.bool)
        for _ in range(self.size - 1):
            child = self.child[self.rows, node, action].long()
            walking = walking & (child != NO_NODE)
            if walking.device.type == "cpu" and not walking.any():
                break
            node = torch.where(walking, child, node)
            action = torch.where(walking, rule.interior(self.edges(node)), action)
        return node, action

    def edges(self, node: Int[Tensor, " roots"]) -> Edges:
        return self._edges(lambda array: array[self.rows, node])

    def _edges(self, take: Callable[[Tensor], Tensor]) -> Edges:
        arrays = (self.logits, self.prior, self.visits, self.returns, self.value)
        logits, prior, visits, returns, value = (take(array).double() for array in arrays)
        return Edges(logits, prior, visits, returns, value, self.low.double(), self.high.double())

    def expand(
        self,
        node: Int[Tensor, " roots"],
        action: Int[Tensor, " roots"],
        *,
        reward: Float[Tensor, " roots"],
        discount: Float[Tensor, " roots"],  # of what follows the reward; negative where the other player moves next
        logits: Float[Tensor, "roots actions"],
        value: Float[Tensor, " roots"],
    ) -> None:
        """Add the child of each selected edge, and back the return up to the root: G ← reward + discount · G."""
        new = self.size
        self.child[self.rows, node, action] = new
        self.parent[:, new], self.parent_action[:, new] = node.int(), action.int()
        self.reward[:, new], self.discount[:, new], self.value[:, new] = reward, discount, value
        self.logits[:, new], self.prior[:, new] = logits, torch.softmax(logits, -1)
        self.size += 1
        self._back_up(new)

    def _back_up(self, new: int) -> None:
        current, value = torch.full_like(self.rows, new), self.value[:, new]
        for _ in range(new):
            climbing = current != 0
            if climbing.device.type == "cpu" and not climbing.any():
                break
            value = self.reward[self.rows, current] + self.discount[self.rows, current] * value
            # A tree that has reached its root adds 0 to an edge that exists anyway.
            node = self.parent[self.rows, current].long().clamp(min=0)
            action = self.parent_action[self.rows, current].long().clamp(min=0)
            edge = (self.rows, node, action)
            self.returns[edge] = torch.where(climbing, self.returns[edge] + value, self.returns[edge])
            self.visits[edge] += climbing.int()
            if not self.fixed_bounds:
                q = self.returns[edge] / self.visits[edge].clamp(min=1)
                self.low = torch.where(climbing, torch.minimum(self.low, q), self.low)
                self.high = torch.where(climbing, torch.maximum(self.high, q), self.high)
            current = node

    # What was found ---------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Edges:
        return self._edges(lambda array: array[:, 0])


@runtime_checkable
class Walker(Protocol):
    """Selects edges of a tree by a rule, and adds nodes to it."""

    def select(self) -> tuple[Int[Tensor, " roots"], Int[Tensor, " roots"]]: ...

    def expand(self, node: Int[Tensor, " roots"], action: Int[Tensor, " roots"], **found: Tensor) -> None: ...


class TreeWalker:
    """The plain one."""

    def __init__(self, tree: SearchTree, rule: SelectionRule) -> None:
        self.tree, self.rule = tree, rule

    def select(self) -> tuple[Int[Tensor, " roots"], Int[Tensor, " roots"]]:
        return self.tree.select(self.rule)

    def expand(self, node: Int[Tensor, " roots"], action: Int[Tensor, " roots"], **found: Tensor) -> None:
        self.tree.expand(node, action, **found)

"""Tree search on the CPU: the walk down the trees and the way back up, as compiled loops (Numba).

They work on the arrays of the plain tree and follow its operations, so that both grow the same trees: scores in
float64, what is stored in float32. The exploration factor of pUCT comes from a table that torch computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

LEAF = -1  # no child
SMALLEST = float(np.finfo(np.float32).tiny)
JIT: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


def supports_walker(planner: Any) -> str | None:
    """Why the kernels cannot search for a planner: there is no reason."""
    return None


RULES = ("rl_lab.components.planners.search_rules.PUCT", "rl_lab.components.planners.search_rules.GumbelRule")


def walker(planner: Any, tree: Any, rule: Any) -> CompiledWalker | None:
    """In place of `MCTS._walker`; None where the rule is another one than those that are compiled."""
    name = f"{type(rule).__module__}.{type(rule).__qualname__}"
    return CompiledWalker(tree, rule) if name in RULES else None


class CompiledWalker:
    """`select` and `expand` of a tree by one rule."""

    def __init__(self, tree: Any, rule: Any) -> None:
        self.tree = tree
        self.node, self.action = torch.zeros(tree.roots, dtype=torch.int64), torch.zeros(tree.roots, dtype=torch.int64)
        edges = tree.logits, tree.prior, tree.child, tree.visits, tree.returns, tree.value
        self._edges = tuple(tensor.numpy() for tensor in edges)
        self._bounds = tree.low.numpy(), tree.high.numpy()
        self._chosen = self.node.numpy(), self.action.numpy()
        links = tree.parent, tree.parent_action, tree.reward, tree.discount
        self._links = tuple(tensor.numpy() for tensor in links)
        self._legal = tree.legal.numpy()
        self._gumbel = hasattr(rule, "noise")
        self._rule: tuple[Any, ...]
        if self._gumbel:
            considered = np.minimum(self._legal.sum(-1), rule.considered)
            schedule = rule.schedule(tree.actions).numpy()[considered]
            self._rule = rule.noise.numpy(), schedule, rule.visit_scale, rule.value_scale, rule.lowest, rule.tiny
        else:
            table = rule.exploration(torch.arange(1.0, tree.simulations + 2.0, dtype=torch.float64)).numpy()
            by_node = rule.normalization == "node"
            self._rule = table, by_node, rule.min_spread, rule.tiny

    @property
    def is_gumbel(self) -> bool:
        return self._gumbel

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a compiled search works on: edges, bounds, legal actions, the rule, the chosen edges, links between
        nodes, and whether the bounds are learned."""
        parts = self._edges, self._bounds, self._legal, self._rule, self._chosen, self._links
        return (*parts, not self.tree.fixed_bounds)

    def select(self) -> tuple[Tensor, Tensor]:
        """(node, action) of the edge to expand in each tree."""
        choose = select_gumbel if self._gumbel else select_puct
        choose(self._edges, self._bounds, self._legal, self._rule, self._chosen)
        return self.node, self.action

    def expand(
        self, node: Tensor, action: Tensor, *, reward: Tensor, discount: Tensor, logits: Tensor, value: Tensor
    ) -> None:
        """Add the child of each selected edge, and back its value up."""
        tree = self.tree
        new = tree.size
        tree.prior[:, new] = torch.softmax(logits, -1)
        found = reward.numpy(), discount.numpy(), logits.numpy(), value.numpy()
        chosen = node.numpy(), action.numpy()
        expand(new, found, self._edges, self._bounds, chosen, self._links, not tree.fixed_bounds)
        tree.size += 1


@njit(inline="always", error_model="numpy")
def _q(returns: float, visits: float) -> float:
    return returns / max(visits, 1.0)


@njit(**JIT)
def _puct(prior, visits, returns, value, low, high, legal, root, table, by_node, min_spread, tiny):
    """The best action of one node."""
    actions, total, count = prior.shape[0], 0.0, 0
    for action in range(actions):
        total += np.float64(returns[action])
        count += visits[action]
    if by_node:
        own = (np.float64(value) + total) / (1.0 + count)
        low, high = own, own
        for action in range(actions):
            if visits[action] > 0:
                q = _q(np.float64(returns[action]), visits[action])
                low, high = min(low, q), max(high, q)
        spread = max(high - low, tiny)
    else:
        spread = max(high - low, min_spread)
    factor, best, best_score = table[count], 0, -np.inf
    for action in range(actions):
        if root and not legal[action]:
            continue
        score = np.float64(prior[action]) * factor / (1.0 + visits[action])
        if visits[action] > 0:
            score = (_q(np.float64(returns[action]), visits[action]) - low) / spread + score
        if score > best_score:
            best, best_score = action, score
    return best


@njit(**JIT)
def select_puct(edges, bounds, legal, rule, chosen):
    """Walk down every tree by pUCT; node and action of the edge to expand into `chosen`."""
    _, prior, child, visits, returns, value = edges
    (low, high), (table, by_node, min_spread, tiny), (node_out, action_out) = bounds, rule, chosen
    for root in range(prior.shape[0]):
        node = 0
        while True:
            action = _puct(
                prior[root, node], visits[root, node], returns[root, node], value[root, node], np.float64(low[root]),
                np.float64(high[root]), legal[root], node == 0, table, by_node, min_spread, tiny,
            )  # fmt: skip
            following = child[root, node, action]
            if following == LEAF:
                break
            node = following
        node_out[root], action_out[root] = node, action


@njit(**JIT)
def _transformed(prior, visits, returns, value, visit_scale, value_scale, tiny, out):
    """σ(Q̂) of one node into `out`; the number of its visits."""
    actions = prior.shape[0]
    count, most, weighted, mass = 0, 0, 0.0, 0.0
    for action in range(actions):
        count += visits[action]
        most = max(most, visits[action])
        if visits[action] > 0:
            share = max(np.float64(prior[action]), SMALLEST)
            weighted += share * _q(np.float64(returns[action]), visits[action])
            mass += share
    mixed = (np.float64(value) + count * (weighted / mass if count else 0.0)) / (1.0 + count)
    low, high = np.inf, -np.inf
    for action in range(actions):
        out[action] = _q(np.float64(returns[action]), visits[action]) if visits[action] > 0 else mixed
        low, high = min(low, out[action]), max(high, out[action])
    spread, scale = max(high - low, tiny), (visit_scale + most) * value_scale
    for action in range(actions):
        out[action] = scale * ((out[action] - low) / spread)
    return count


@njit(**JIT)
def select_gumbel(edges, bounds, legal, rule, chosen):
    """Walk down every tree by Gumbel MuZero's rules."""
    logits, prior, child, visits, returns, value = edges
    noise, schedule, visit_scale, value_scale, lowest, tiny = rule
    node_out, action_out = chosen
    roots, _, actions = prior.shape
    score = np.empty(actions)
    for root in range(roots):
        count = _transformed(
            prior[root, 0], visits[root, 0], returns[root, 0], value[root, 0], visit_scale, value_scale, tiny, score
        )
        wanted, highest = schedule[root, count], -np.inf
        for action in range(actions):
            highest = max(highest, np.float64(logits[root, 0, action]))
        node, choice, best = 0, 0, -np.inf
        for action in range(actions):
            if legal[root, action] and visits[root, 0, action] == wanted:
                own = max(noise[root, action] + (np.float64(logits[root, 0, action]) - highest) + score[action], lowest)
                if own > best:
                    choice, best = action, own
        following = child[root, 0, choice]
        while following != LEAF:
            node = following
            choice = _lagging(
                logits[root, node], prior[root, node], visits[root, node], returns[root, node], value[root, node],
                visit_scale, value_scale, tiny, score,
            )  # fmt: skip
            following = child[root, node, choice]
        node_out[root], action_out[root] = node, choice


@njit(**JIT)
def _lagging(logits, prior, visits, returns, value, visit_scale, value_scale, tiny, score):
    """The action whose share of visits lags most behind the improved policy."""
    count = _transformed(prior, visits, returns, value, visit_scale, value_scale, tiny, score)
    actions, highest, total = logits.shape[0], -np.inf, 0.0
    for action in range(actions):
        score[action] = np.float64(logits[action]) + score[action]
        highest = max(highest, score[action])
    for action in range(actions):
        score[action] = np.exp(score[action] - highest)
        total += score[action]
    choice, best = 0, -np.inf
    for action in range(actions):
        own = score[action] / total - visits[action] / (1.0 + count)
        if own > best:
            choice, best = action, own
    return choice


@njit(**JIT)
def expand(new, found, edges, bounds, chosen, links, learns_bounds):
    """Add node `new` to every tree at the chosen edge, and back its value up."""
    reward, discount, logits, value = found
    all_logits, _, child, visits, returns, values = edges
    (low, high), (node, action), (parent, parent_action, rewards, discounts) = bounds, chosen, links
    for root in range(node.shape[0]):
        child[root, node[root], action[root]] = new
        parent[root, new], parent_action[root, new] = node[root], action[root]
        rewards[root, new], discounts[root, new], values[root, new] = reward[root], discount[root], value[root]
        for edge in range(logits.shape[1]):
            all_logits[root, new, edge] = logits[root, edge]
        current, total = np.int32(new), value[root]
        while current != 0:
            total = rewards[root, current] + discounts[root, current] * total
            edge, current = parent_action[root, current], parent[root, current]
            returns[root, current, edge] += total
            visits[root, current, edge] += 1
            if learns_bounds:
                q = returns[root, current, edge] / np.float32(visits[root, current, edge])
                low[root], high[root] = min(low[root], q), max(high[root], q)

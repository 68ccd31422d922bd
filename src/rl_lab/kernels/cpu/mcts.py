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

from rl_lab.kernels.catalogue import SEARCH_RULES
from rl_lab.kernels.registry import full_name

LEAF = -1  # no child
SMALLEST = float(np.finfo(np.float32).tiny)
# Nothing is allocated in here: without reference counts (`_nrt`) the walks take less than half of the time.
JIT: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}


def walker(planner: Any, tree: Any, rule: Any) -> CompiledWalker | None:
    """In place of `MCTS._walker`; None where the rule is another one than those that are compiled."""
    return CompiledWalker(tree, rule) if full_name(type(rule)) in SEARCH_RULES else None


class CompiledWalker:
    """`select` and `expand` of a tree by one rule."""

    def __init__(self, tree: Any, rule: Any) -> None:
        self.tree = tree
        chosen = torch.zeros(2, tree.roots, dtype=torch.int64)
        self.node, self.action = chosen
        edges = tree.logits, tree.prior, tree.child, tree.visits, tree.returns, tree.value
        self._edges = tuple(tensor.numpy() for tensor in edges)
        self._chosen = tuple(chosen.numpy())
        links = tree.parent, tree.parent_action, tree.reward, tree.discount
        self._links = tuple(tensor.numpy() for tensor in links)
        self._bounds, self._legal = (tree.low.numpy(), tree.high.numpy()), tree.legal.numpy()
        self.is_gumbel = hasattr(rule, "noise")
        if self.is_gumbel:
            considered = np.minimum(self._legal.sum(-1), rule.considered)
            schedule = rule.schedule(tree.actions, tree.legal.device).numpy()[considered]
            low, high = rule.bounds or (0.0, 0.0)
            scales = rule.visit_scale, rule.value_scale, rule.lowest, rule.tiny, float(low), float(high - low)
            self._rule: tuple[Any, ...] = rule.noise.numpy(), schedule, scales, np.empty(tree.actions)
        else:
            table = rule.exploration(torch.arange(1.0, tree.simulations + 2.0, dtype=torch.float64)).numpy()
            self._rule = table, rule.normalization == "node", rule.min_spread, rule.tiny

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Edges, bounds, legal actions, the rule, chosen edges, links between nodes, whether the bounds are learned."""
        parts = self._edges, self._bounds, self._legal, self._rule, self._chosen, self._links
        return (*parts, not self.tree.fixed_bounds)

    def select(self) -> tuple[Tensor, Tensor]:
        """(node, action) of the edge to expand in each tree."""
        choose = select_gumbel if self.is_gumbel else select_puct
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


@njit(**JIT)
def _puct(edges, root, node, low, high, legal, rule):
    """The best action of one node. `low`, `high`: the range of Q in its tree."""
    _, prior, _, visits, returns, value = edges
    table, by_node, min_spread, tiny = rule
    actions, total, count = prior.shape[2], 0.0, 0
    for action in range(actions):
        total += np.float64(returns[root, node, action])
        count += visits[root, node, action]
    spread = max(high - low, min_spread)
    if by_node:
        own = (np.float64(value[root, node]) + total) / (1.0 + count)
        low, high = own, own
        for action in range(actions):
            if visits[root, node, action] > 0:
                q = np.float64(returns[root, node, action]) / visits[root, node, action]
                low, high = min(low, q), max(high, q)
        spread = max(high - low, tiny)
    factor, best, best_score = table[count], 0, -np.inf
    for action in range(actions):
        if node == 0 and not legal[root, action]:
            continue
        taken = visits[root, node, action]
        score = np.float64(prior[root, node, action]) * factor / (1.0 + taken)
        if taken > 0:
            score = (np.float64(returns[root, node, action]) / taken - low) / spread + score
        if score > best_score:
            best, best_score = action, score
    return best


@njit(**JIT)
def select_puct(edges, bounds, legal, rule, chosen):
    """Walk down every tree by pUCT; node and action of the edge to expand into `chosen`."""
    child, (low, high), (node_out, action_out) = edges[2], bounds, chosen
    for root in range(child.shape[0]):
        node, own_low, own_high = 0, np.float64(low[root]), np.float64(high[root])
        action = _puct(edges, root, node, own_low, own_high, legal, rule)
        while child[root, node, action] != LEAF:
            node = child[root, node, action]
            action = _puct(edges, root, node, own_low, own_high, legal, rule)
        node_out[root], action_out[root] = node, action


@njit(**JIT)
def _transformed(edges, root, node, scales, out):
    """σ(Q̂) of one node into `out`; the number of its visits."""
    (_, prior, _, visits, returns, value), (visit_scale, value_scale, _, tiny, low, spread) = edges, scales
    actions, count, most, weighted, mass = prior.shape[2], 0, 0, 0.0, 0.0
    for action in range(actions):
        taken = visits[root, node, action]
        if taken > 0:
            share = max(np.float64(prior[root, node, action]), SMALLEST)
            out[action] = np.float64(returns[root, node, action]) / taken
            weighted += share * out[action]
            mass += share
            count += taken
            most = max(most, taken)
    mixed = (np.float64(value[root, node]) + count * (weighted / mass if count else 0.0)) / (1.0 + count)
    least, most_q = np.inf, -np.inf
    for action in range(actions):
        if visits[root, node, action] == 0:
            out[action] = mixed
        least, most_q = min(least, out[action]), max(most_q, out[action])
    if spread == 0.0:  # no known bounds
        low, spread = least, max(most_q - least, tiny)
    scale = (visit_scale + most) * value_scale
    for action in range(actions):
        out[action] = scale * ((out[action] - low) / spread)
    return count


@njit(**JIT)
def _halving(edges, root, legal, rule):
    """The best action of a root among those with as many visits as the schedule says."""
    logits, visits, (noise, schedule, scales, score) = edges[0], edges[3], rule
    wanted, lowest, highest = schedule[root, _transformed(edges, root, 0, scales, score)], scales[2], -np.inf
    for action in range(logits.shape[2]):
        highest = max(highest, np.float64(logits[root, 0, action]))
    choice, best = 0, -np.inf
    for action in range(logits.shape[2]):
        if legal[root, action] and visits[root, 0, action] == wanted:
            own = noise[root, action] + (np.float64(logits[root, 0, action]) - highest) + score[action]
            if max(own, lowest) > best:
                choice, best = action, max(own, lowest)
    return choice


@njit(**JIT)
def _lagging(edges, root, node, rule):
    """The action whose share of visits lags most behind the improved policy."""
    logits, visits, (_, _, scales, score) = edges[0], edges[3], rule
    count, actions = _transformed(edges, root, node, scales, score), logits.shape[2]
    highest, total = -np.inf, 0.0
    for action in range(actions):
        score[action] = np.float64(logits[root, node, action]) + score[action]
        highest = max(highest, score[action])
    for action in range(actions):
        score[action] = np.exp(score[action] - highest)
        total += score[action]
    choice, best = 0, -np.inf
    for action in range(actions):
        own = score[action] / total - visits[root, node, action] / (1.0 + count)
        if own > best:
            choice, best = action, own
    return choice


@njit(**JIT)
def select_gumbel(edges, bounds, legal, rule, chosen):
    """Walk down every tree by Gumbel MuZero's rules; node and action of the edge to expand into `chosen`."""
    child, (node_out, action_out) = edges[2], chosen
    for root in range(child.shape[0]):
        node, action = 0, _halving(edges, root, legal, rule)
        while child[root, node, action] != LEAF:
            node = child[root, node, action]
            action = _lagging(edges, root, node, rule)
        node_out[root], action_out[root] = node, action


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

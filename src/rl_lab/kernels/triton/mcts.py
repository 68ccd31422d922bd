"""Tree search on a GPU: the walk down the trees and the way back up as two Triton kernels, a program for each tree.

They work on the arrays of the plain tree and follow its operations, scores in float64, so that both grow the same
trees. Nothing is read back to the host in a search.
"""

# Arguments in capitals are constants of the compiled kernel; Triton's own types stand for the others.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_lab.kernels.catalogue import SEARCH_RULES
from rl_lab.kernels.registry import full_name, launch


def walker(planner: Any, tree: Any, rule: Any) -> DeviceWalker | None:
    """In place of `MCTS._walker`; None where the rule is another one than those that have a kernel."""
    return DeviceWalker(tree, rule) if full_name(type(rule)) in SEARCH_RULES else None


class DeviceWalker:
    """`select` and `expand` of a tree by one rule."""

    def __init__(self, tree: Any, rule: Any) -> None:
        self.tree, self.rule, device = tree, rule, tree.logits.device
        self.block = triton.next_power_of_2(tree.actions)
        self.node = torch.zeros(tree.roots, dtype=torch.int64, device=device)
        self.action = torch.zeros_like(self.node)
        self.legal = tree.legal.int()
        self.is_gumbel = hasattr(rule, "noise")
        if self.is_gumbel:
            considered = tree.legal.sum(-1).clamp(max=rule.considered)
            self.schedule = rule.schedule(tree.actions, device)[considered].int()
            self.noise = rule.noise.contiguous()
            low, high = rule.bounds or (0.0, 0.0)
            constants = [rule.visit_scale, rule.value_scale, rule.lowest, rule.tiny, low, high - low]
        else:
            counts = torch.arange(1.0, tree.simulations + 2.0, dtype=torch.float64, device=device)
            self.table = rule.exploration(counts)
            constants = [rule.min_spread, rule.tiny]
        # In memory: as arguments they would be rounded to float32. Filled on the device: a graph cannot copy to it.
        self.constants = torch.stack([torch.full((), value, dtype=torch.float64, device=device) for value in constants])

    def select(self) -> tuple[Tensor, Tensor]:
        """(node, action) of the edge to expand in each tree."""
        tree, rule, sizes = self.tree, self.rule, (self.tree.simulations + 1, self.tree.actions)
        edges = tree.child, tree.visits, tree.returns, tree.value
        if self.is_gumbel:
            launch(
                select_gumbel, (tree.roots,), tree.logits, tree.prior, *edges, self.legal, self.noise, self.schedule,
                self.node, self.action, self.constants, *sizes, tree.simulations, BLOCK=self.block,
            )  # fmt: skip
        else:
            launch(
                select_puct, (tree.roots,), tree.prior, *edges, tree.low, tree.high, self.legal, self.table, self.node,
                self.action, self.constants, *sizes, BY_NODE=rule.normalization == "node", BLOCK=self.block,
            )  # fmt: skip
        return self.node, self.action

    def expand(
        self, node: Tensor, action: Tensor, *, reward: Tensor, discount: Tensor, logits: Tensor, value: Tensor
    ) -> None:
        """Add the child of each selected edge, and back its value up."""
        tree, new = self.tree, self.tree.size
        tree.reward[:, new], tree.discount[:, new], tree.value[:, new] = reward, discount, value
        tree.logits[:, new], tree.prior[:, new] = logits, torch.softmax(logits, -1)
        launch(
            back_up, (tree.roots,), node, action, tree.child, tree.visits, tree.returns, tree.value, tree.parent,
            tree.parent_action, tree.reward, tree.discount, tree.low, tree.high, new, tree.simulations + 1,
            tree.actions, LEARNS_BOUNDS=not tree.fixed_bounds,
        )  # fmt: skip
        tree.size += 1


@triton.jit
def select_puct(
    prior, child, visits, returns, value, low, high, legal, table, node_out, action_out, constants, nodes, actions,
    BY_NODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    root = tl.program_id(0)
    min_spread, tiny = tl.load(constants), tl.load(constants + 1)
    column = tl.arange(0, BLOCK)
    inside = column < actions
    permitted = tl.load(legal + root * actions + column, mask=inside, other=0) > 0
    tree_low, tree_high = tl.load(low + root).to(tl.float64), tl.load(high + root).to(tl.float64)
    node = root * 0
    action = root * 0
    walking = root >= 0
    while walking:
        edge = (root * nodes + node) * actions + column
        count = tl.load(visits + edge, mask=inside, other=0)
        total = tl.load(returns + edge, mask=inside, other=0.0).to(tl.float64)
        taken = count > 0
        q = total / tl.maximum(count, 1).to(tl.float64)
        if BY_NODE:
            own_value = tl.load(value + root * nodes + node).to(tl.float64)
            own = (own_value + tl.sum(total, 0)) / (1.0 + tl.sum(count, 0)).to(tl.float64)
            known = tl.where(taken, q, own)
            least = tl.minimum(own, tl.min(known, 0))
            spread = tl.maximum(tl.maximum(own, tl.max(known, 0)) - least, tiny)
        else:
            least = tree_low
            spread = tl.maximum(tree_high - tree_low, min_spread)
        factor = tl.load(table + tl.sum(count, 0))
        weight = tl.load(prior + edge, mask=inside, other=0.0).to(tl.float64) * factor / (1.0 + count).to(tl.float64)
        score = tl.where(taken, (q - least) / spread, 0.0) + weight
        score = tl.where(inside & (permitted | (node != 0)), score, -float("inf"))
        action = tl.argmax(score, 0)
        following = tl.load(child + (root * nodes + node) * actions + action)
        walking = following >= 0
        node = tl.where(walking, following, node)
    tl.store(node_out + root, node.to(tl.int64))
    tl.store(action_out + root, action.to(tl.int64))


@triton.jit
def _transformed(prior, count, total, own_value, inside, visit_scale, value_scale, tiny, low, range_):
    """σ(Q̂) of one node's edges. `range_` is 0 where the bounds of Q are not known."""
    taken = count > 0
    q = total / tl.maximum(count, 1).to(tl.float64)
    prior = tl.where(taken, tl.maximum(prior, 1.1754943508222875e-38), 0.0)
    all_visits = tl.sum(count, 0)
    mass = tl.where(all_visits > 0, tl.sum(prior, 0), 1.0)
    visits = all_visits.to(tl.float64)
    mixed = (own_value + visits * (tl.sum(prior * q, 0) / mass)) / (1.0 + visits)
    q = tl.where(taken, q, mixed)
    least = tl.min(tl.where(inside, q, float("inf")), 0)
    spread = tl.maximum(tl.max(tl.where(inside, q, -float("inf")), 0) - least, tiny)
    least, spread = tl.where(range_ > 0, low, least), tl.where(range_ > 0, range_, spread)
    return (visit_scale + tl.max(count, 0).to(tl.float64)) * value_scale * ((q - least) / spread)


@triton.jit
def select_gumbel(
    logits, prior, child, visits, returns, value, legal, noise, schedule, node_out, action_out, constants, nodes,
    actions, simulations, BLOCK: tl.constexpr,
):  # fmt: skip
    root = tl.program_id(0)
    visit_scale, value_scale = tl.load(constants), tl.load(constants + 1)
    lowest, tiny = tl.load(constants + 2), tl.load(constants + 3)
    low, range_ = tl.load(constants + 4), tl.load(constants + 5)
    column = tl.arange(0, BLOCK)
    inside = column < actions
    permitted = tl.load(legal + root * actions + column, mask=inside, other=0) > 0
    own_noise = tl.load(noise + root * actions + column, mask=inside, other=0.0)
    node = root * 0
    action = root * 0
    walking = root >= 0
    while walking:
        edge = (root * nodes + node) * actions + column
        count = tl.load(visits + edge, mask=inside, other=0)
        total = tl.load(returns + edge, mask=inside, other=0.0).to(tl.float64)
        own_logits = tl.load(logits + edge, mask=inside, other=-float("inf")).to(tl.float64)
        own_value = tl.load(value + root * nodes + node).to(tl.float64)
        own_prior = tl.load(prior + edge, mask=inside, other=0.0).to(tl.float64)
        change = _transformed(own_prior, count, total, own_value, inside, visit_scale, value_scale, tiny, low, range_)
        done = tl.sum(count, 0)
        # At the root, the best of the actions with as many visits as the schedule says.
        wanted = tl.load(schedule + root * simulations + tl.minimum(done, simulations - 1))
        best = tl.maximum(own_noise + (own_logits - tl.max(own_logits, 0)) + change, lowest)
        best = tl.where(inside & permitted & (count == wanted), best, -float("inf"))
        # Below it, the action that lags most behind the improved policy.
        improved = own_logits + change
        improved = tl.where(inside, tl.exp(improved - tl.max(tl.where(inside, improved, -float("inf")), 0)), 0.0)
        lag = improved / tl.sum(improved, 0) - count.to(tl.float64) / (1.0 + done).to(tl.float64)
        lag = tl.where(inside, lag, -float("inf"))
        action = tl.argmax(tl.where(node == 0, best, lag), 0)
        following = tl.load(child + (root * nodes + node) * actions + action)
        walking = following >= 0
        node = tl.where(walking, following, node)
    tl.store(node_out + root, node.to(tl.int64))
    tl.store(action_out + root, action.to(tl.int64))


@triton.jit
def back_up(
    node, action, child, visits, returns, value, parent, parent_action, reward, discount, low, high, new, nodes,
    actions, LEARNS_BOUNDS: tl.constexpr,
):  # fmt: skip
    root = tl.program_id(0)
    above, edge = tl.load(node + root).to(tl.int32), tl.load(action + root).to(tl.int32)
    tl.store(child + (root * nodes + above) * actions + edge, new)
    tl.store(parent + root * nodes + new, above)
    tl.store(parent_action + root * nodes + new, edge)
    least, most = tl.load(low + root), tl.load(high + root)
    current = root * 0 + new
    total = tl.load(value + root * nodes + new)
    climbing = current > 0
    while climbing:
        place = root * nodes + current
        total = tl.load(reward + place) + tl.load(discount + place) * total
        taken = (root * nodes + above) * actions + edge
        sum_ = tl.load(returns + taken) + total
        count = tl.load(visits + taken) + 1
        tl.store(returns + taken, sum_)
        tl.store(visits + taken, count)
        q = sum_ / count.to(tl.float32)
        least, most = tl.minimum(least, q), tl.maximum(most, q)
        current = above
        climbing = current > 0
        above = tl.load(parent + root * nodes + current)
        edge = tl.load(parent_action + root * nodes + current)
    if LEARNS_BOUNDS:
        tl.store(low + root, least)
        tl.store(high + root, most)

"""Which edge a tree search follows: pUCT as in MuZero, and the rules of Gumbel MuZero (Danihelka et al., 2022)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_lab.components.planners.search_tree import Edges

Normalization = Literal["tree", "node"]
TINY = 1e-8  # smallest spread of values that is divided by
LOWEST_SCORE = -1e9  # of an action that is still considered


class SelectionRule(ABC):
    """Chooses one action in each tree, at the root and below it. Of equal scores the first wins."""

    tiny, lowest = TINY, LOWEST_SCORE

    @abstractmethod
    def root(self, edges: Edges, legal: Bool[Tensor, "roots actions"]) -> Int[Tensor, " roots"]: ...

    @abstractmethod
    def interior(self, edges: Edges) -> Int[Tensor, " roots"]: ...


class PUCT(SelectionRule):
    """argmax_a Qn(a) + P(a) · √N / (1 + N(a)) · (c1 + log((N + c2 + 1) / c2)), where N counts the node itself, so that
    the prior decides the first choice.

    Q is scaled to [0, 1]: by the range seen in the whole tree, at least `min_spread` wide (`tree`), or by that of the
    node and its children (`node`, as mctx does). An edge that was never taken has the lowest Q of that range.
    """

    def __init__(
        self,
        *,
        normalization: Normalization = "tree",
        c1: float = 1.25,
        c2: float = 19652.0,
        min_spread: float = 0.01,
    ) -> None:
        self.normalization, self.c1, self.c2, self.min_spread = normalization, c1, c2, min_spread

    def root(self, edges: Edges, legal: Bool[Tensor, "roots actions"]) -> Int[Tensor, " roots"]:
        return self.scores(edges).masked_fill(~legal, -torch.inf).argmax(-1)

    def interior(self, edges: Edges) -> Int[Tensor, " roots"]:
        return self.scores(edges).argmax(-1)

    def scores(self, edges: Edges) -> Float[Tensor, "roots actions"]:
        factor = self.exploration(1.0 + edges.visits.sum(-1, keepdim=True))
        return self.normalized(edges) + edges.prior * factor / (1.0 + edges.visits)

    def exploration(self, count: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """√N · (c1 + log((N + c2 + 1) / c2)) of nodes that were visited N times."""
        return torch.sqrt(count) * (self.c1 + torch.log((count + self.c2 + 1.0) / self.c2))

    def normalized(self, edges: Edges) -> Float[Tensor, "roots actions"]:
        """Q scaled to [0, 1]; 0 for edges that were never taken."""
        taken, q = edges.visits > 0, edges.q
        if self.normalization == "node":
            own = edges.value[:, None]
            known = torch.where(taken, q, own)
            low = torch.minimum(own, known.amin(-1, keepdim=True))
            spread = (torch.maximum(own, known.amax(-1, keepdim=True)) - low).clamp(min=TINY)
        else:
            low, spread = edges.low[:, None], (edges.high - edges.low)[:, None].clamp(min=self.min_spread)
        return torch.where(taken, (q - low) / spread, 0.0)


class GumbelRule(SelectionRule):
    """Sequential halving at the root, and below it the action whose share of visits lags most behind the improved
    policy.

    At the root g(a) + logits(a) + σ(Q̂(a)) decides among the actions that have as many visits as the schedule says.
    σ scales Q to [0, 1] by the range of the node, so that its best action counts as much whether it is far better than
    the others or hardly; with `bounds`, the known range of returns, equal actions stay equal.
    """

    def __init__(
        self,
        *,
        noise: Float[Tensor, "roots actions"],  # Gumbel noise of this search; zeros: the mode
        simulations: int,
        considered: int = 16,
        visit_scale: float = 50.0,
        value_scale: float = 0.1,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        self.bounds = bounds
        self.noise, self.simulations, self.considered = noise.double(), simulations, considered
        self.visit_scale, self.value_scale = visit_scale, value_scale

    def root(self, edges: Edges, legal: Bool[Tensor, "roots actions"]) -> Int[Tensor, " roots"]:
        done = edges.visits.sum(-1).long()
        count = legal.sum(-1).clamp(max=self.considered)
        visits = self.schedule(legal.shape[-1], legal.device)[count, done]
        return self.best(edges, legal, self.transformed(edges), visits)

    def schedule(self, actions: int, device: torch.device) -> Int[Tensor, "considered simulations"]:
        """Visits that the action of each simulation has so far, for every number of considered actions."""
        return halving_table(actions, self.simulations, device)

    def best(
        self,
        edges: Edges,
        legal: Bool[Tensor, "roots actions"],
        transformed: Float[Tensor, "roots actions"],  # σ(Q̂)
        visits: Int[Tensor, " roots"] | Float[Tensor, " roots"],
    ) -> Int[Tensor, " roots"]:
        """The best of the actions with so many visits."""
        logits = edges.logits - edges.logits.amax(-1, keepdim=True)
        score = (self.noise + logits + transformed).clamp(min=LOWEST_SCORE)
        return score.masked_fill((edges.visits != visits[:, None]) | ~legal, -torch.inf).argmax(-1)

    def interior(self, edges: Edges) -> Int[Tensor, " roots"]:
        share = edges.visits / (1.0 + edges.visits.sum(-1, keepdim=True))
        return (self.improved(edges, self.transformed(edges)) - share).argmax(-1)

    def improved(self, edges: Edges, transformed: Float[Tensor, "roots actions"]) -> Float[Tensor, "roots actions"]:
        """The improved policy softmax(logits + σ(Q̂))."""
        return torch.softmax(edges.logits + transformed, -1)

    def transformed(self, edges: Edges) -> Float[Tensor, "roots actions"]:
        """σ(Q̂): Q where it is known and the mixed value elsewhere, scaled to [0, 1], and weighted more the more visits
        there are."""
        q = torch.where(edges.visits > 0, edges.q, mixed_value(edges)[:, None])
        if self.bounds is None:
            low = q.amin(-1, keepdim=True)
            q = (q - low) / (q.amax(-1, keepdim=True) - low).clamp(min=TINY)
        else:
            q = (q - self.bounds[0]) / (self.bounds[1] - self.bounds[0])
        return (self.visit_scale + edges.visits.amax(-1, keepdim=True)) * self.value_scale * q


def mixed_value(edges: Edges) -> Float[Tensor, " roots"]:
    """v_mix: the node's own value, averaged with the Q of the actions taken, weighted by the prior."""
    taken = edges.visits > 0
    prior = edges.prior.clamp(min=torch.finfo(torch.float32).tiny) * taken
    count = edges.visits.sum(-1)
    weighted = (prior * edges.q).sum(-1) / torch.where(count > 0, prior.sum(-1), 1.0)
    return (edges.raw_value + count * weighted) / (1.0 + count)


@cache
def halving_table(actions: int, simulations: int, device: torch.device) -> Int[Tensor, "considered simulations"]:
    """Row m: how many visits the action of each simulation has so far, when m actions are considered."""
    return torch.tensor([halving_schedule(count, simulations) for count in range(actions + 1)], device=device)


def halving_schedule(considered: int, simulations: int) -> list[int]:
    """Sequential halving: all considered actions get the same share of a round, and half of them reach the next."""
    if considered <= 1:
        return list(range(simulations))
    rounds, left, schedule = math.ceil(math.log2(considered)), considered, list[int]()
    visits = [0] * considered
    while len(schedule) < simulations:
        for _ in range(max(1, simulations // (rounds * left))):
            schedule += visits[:left]
            visits[:left] = [count + 1 for count in visits[:left]]
        left = max(2, left // 2)
    return schedule[:simulations]

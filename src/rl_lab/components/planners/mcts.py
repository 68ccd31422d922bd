"""Monte-Carlo tree search in any simulator: MuZero's pUCT, Gumbel MuZero, and sampled actions for continuous spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_lab.components.planners.base import Memory, Plan, Planner
from rl_lab.components.planners.search_rules import PUCT, GumbelRule, Normalization, SelectionRule
from rl_lab.components.planners.search_tree import SearchTree, TreeWalker, Walker
from rl_lab.components.planners.state_store import StateStore
from rl_lab.errors import ConfigError, DataError
from rl_lab.kernels.registry import Accelerated
from rl_lab.nn.distributions import one_hot
from rl_lab.simulation.simulator import ModelState, batch_size

ILLEGAL = torch.finfo(torch.float32).min  # logit of an action that cannot be taken; not -inf, which makes NaN

# State, reward, continuation, actions (None: all classes), logits, value.
Expanded = tuple[ModelState, Tensor, Tensor, Tensor | None, Tensor, Tensor]
COLDEST = 1e-6  # temperature that is divided by
MIN_DISCOUNT = 0.1  # a value that includes a reward is divided by no less


@dataclass(frozen=True)
class Search:
    """The result of a search at its roots."""

    tree: SearchTree
    actions: Float[Tensor, "roots actions action"]  # encoded: the actions of the root's edges
    chosen: Int[Tensor, " roots"]  # the edge to take without further exploration
    policy: Float[Tensor, "roots actions"]  # the policy target: shares of visits, or the improved policy
    value: Float[Tensor, " roots"]
    prior_value: Float[Tensor, " roots"]  # the model's own value of the root, without search

    @property
    def visits(self) -> Float[Tensor, "roots actions"]:
        return self.tree.visits[:, 0].float()

    @property
    def q(self) -> Float[Tensor, "roots actions"]:
        """Mean return of each action; NaN where it was never tried."""
        return torch.where(self.visits > 0, self.tree.root.q.float(), torch.nan)

    def sample(self, temperature: Float[Tensor, ""] | float) -> Int[Tensor, " roots"]:
        """An edge with probability N^(1/temperature) / Σ N^(1/temperature): the largest of log(N) / temperature +
        Gumbel noise. With temperature 0 one of those that were visited most."""
        scores = self.visits.log() / torch.as_tensor(temperature).clamp(min=COLDEST)
        return (scores - torch.empty_like(scores).exponential_().log()).argmax(-1)


@dataclass(frozen=True)
class SearchPlan(Plan):
    """A plan of one step whose candidates are the root's actions, with the search that it comes from."""

    search: Search


class MCTS(Accelerated, Planner):
    """Searches a tree of the model's states for every environment at once: one call of the model per simulation.

    One discrete action has an edge for each class. Other actions need `sampled_actions`: each node then has so many
    edges, whose actions are drawn from the model's policy and have equal priors (Hubert et al., 2021). The search
    takes the model's value at new nodes, or the return of random actions where the model has none
    (`leaf_value: rollout`).
    """

    def __init__(
        self,
        *,
        simulations: int = 50,
        rule: Literal["puct", "gumbel"] = "puct",
        prior: Literal["model", "uniform"] = "model",
        leaf_value: Literal["model", "rollout"] = "model",
        rollout_length: int = 15,
        sampled_actions: int | None = None,
        players: int = 1,  # 2: turns alternate, and what one player gains the other loses
        c1: float = 1.25,
        c2: float = 19652.0,
        normalization: Normalization = "tree",
        min_spread: float = 0.01,
        value_bounds: tuple[float, float] | None = None,  # known range of returns; null: the range seen
        noise_share: float = 0.25,  # of Dirichlet noise in the root's prior, while exploring
        noise_alpha: float = 0.3,
        considered: int = 16,  # Gumbel: actions that the root begins with
        visit_scale: float = 50.0,
        value_scale: float = 0.1,
        **arguments: Any,
    ) -> None:
        unused = {"horizon": 1, "particles": 1, "bootstrap": "auto", "warm_start": False, "noise_beta": 0.0}
        super().__init__(**{"discount": "auto", **unused, **arguments})
        if simulations < 1 or considered < 1 or rollout_length < 1:
            raise ConfigError(
                f"simulations={simulations}, considered={considered}, rollout_length={rollout_length}: expected at "
                "least 1 of each."
            )
        if players not in (1, 2):
            raise ConfigError(f"players={players}: expected 1, or 2 whose turns alternate.")
        if not 0.0 <= noise_share <= 1.0 or noise_alpha <= 0.0:
            raise ConfigError(
                f"noise_share={noise_share}, noise_alpha={noise_alpha}: expected a share from 0 to 1 and an alpha above"
                " 0."
            )
        if value_bounds is not None and value_bounds[0] >= value_bounds[1]:
            raise ConfigError(f"value_bounds={list(value_bounds)}: expected the lowest return, then the highest.")
        if players == 2 and leaf_value == "rollout":
            raise ConfigError("players=2 needs leaf_value=model: random actions of both players say little of a game.")
        self.enumerates = sampled_actions is None
        if self.enumerates and (self.layout.continuous or len(self.layout.classes) != 1):
            raise ConfigError(
                "sampled_actions=null searches all classes of one discrete action, but this action has "
                f"{self.layout.continuous} continuous entries and the classes {list(self.layout.classes)}. Set "
                "sampled_actions=20, say: each node then tries so many actions of the model's policy."
            )
        if sampled_actions is not None and sampled_actions < 2:
            raise ConfigError(f"sampled_actions={sampled_actions}: expected at least 2, or null.")
        self.simulations, self.rule, self.prior, self.leaf_value = simulations, rule, prior, leaf_value
        self.rollout_length, self.players, self.bounds = rollout_length, players, value_bounds
        self.edges = self.layout.size if sampled_actions is None else sampled_actions
        self.noise_share, self.noise_alpha = noise_share, noise_alpha
        self.puct = PUCT(normalization=normalization, c1=c1, c2=c2, min_spread=min_spread)
        self.considered, self.visit_scale, self.value_scale = considered, visit_scale, value_scale

    def check_model(self) -> None:
        super().check_model()
        simulator = self.simulator
        name = type(simulator).__name__
        if self.leaf_value == "model" and not simulator.has_value:
            raise ConfigError(
                f"MCTS needs a value of each new node, but {name} predicts none. Give the model a critic, or set "
                "leaf_value=rollout, which follows random actions instead."
            )
        if self.prior == "model" and not (simulator.has_logits if self.enumerates else simulator.has_policy):
            raise ConfigError(
                f"MCTS needs a prior over actions, but {name} has no policy for this action. Give the model a policy, "
                "or set prior=uniform."
            )

    # The search -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def search(
        self,
        state: ModelState,
        *,
        explore: bool = False,
        legal: Bool[Tensor, "roots actions"] | None = None,
        simulations: int | None = None,
        noise: Float[Tensor, "roots actions"] | None = None,
    ) -> Search:
        """Search from one state in each environment. `explore` adds noise to the root: Dirichlet's or Gumbel's, drawn
        here unless `noise` is given. `legal` says which actions the roots allow."""
        count = self.simulations if simulations is None else simulations
        sampled, logits, value = self._evaluate(state)
        if legal is not None:
            if logits.device.type == "cpu" and not legal.any(-1).all():
                raise DataError("The action mask allows no action at all, so there is nothing to search for.")
            logits = (logits - logits.amax(-1, keepdim=True)).masked_fill(~legal, ILLEGAL)
        if noise is None and explore:
            noise = self._draw_root_noise(logits, legal)
        tree = SearchTree(
            logits=logits, value=value, simulations=count, legal=legal, bounds=self.bounds,
            prior=self._noisy_prior(logits, noise) if self.rule == "puct" and noise is not None else None,
        )  # fmt: skip
        rule = self._selection_rule(logits, noise, count)
        self._grow(tree, rule, state, sampled)
        return self._result(tree, rule, self._classes(len(logits)) if sampled is None else sampled)

    def _selection_rule(self, logits: Tensor, noise: Tensor | None, simulations: int) -> SelectionRule:
        if self.rule == "puct":
            return self.puct
        return GumbelRule(
            noise=torch.zeros_like(logits) if noise is None else noise, simulations=simulations,
            considered=self.considered, visit_scale=self.visit_scale, value_scale=self.value_scale, bounds=self.bounds,
        )  # fmt: skip

    def _grow(self, tree: SearchTree, rule: SelectionRule, state: ModelState, actions: Tensor | None) -> None:
        """All simulations: select an edge in each tree, take it in the model, add what follows."""
        if self.kernels and (kernel := self.kernel("_grow")) is not None and kernel(self, tree, rule, state):
            return
        simulator, sign = self.simulator, 1.0 if self.players == 1 else -1.0
        states = StateStore(state, tree.simulations + 1)
        sampled = None if actions is None else StateStore(actions, tree.simulations + 1)
        walker = self._walker(tree, rule)
        for _ in range(tree.simulations):
            node, edge = walker.select()
            action = one_hot(edge, tree.actions) if sampled is None else sampled.at(node)[tree.rows, edge]
            following, reward, continuation, actions, logits, value = self._expand(states.at(node), action)
            states.append(following)
            if sampled is not None:
                sampled.append(actions)
            discount = sign * self.discount * continuation
            if simulator.value_includes_reward:  # what a node is worth here is what follows the reward of its edge
                value = (value - reward) / discount.clamp(min=MIN_DISCOUNT)
            walker.expand(node, edge, reward=reward.float(), discount=discount.float(), logits=logits, value=value)

    def _expand(self, state: ModelState, action: Tensor) -> Expanded:
        """Step the model: what follows, and the actions, logits and value of the new node."""
        following = self.simulator.step(state, action)
        return (*following, *self._evaluate(following.state))

    @property
    def _predicts(self) -> bool:
        """Whether a node needs nothing but the model's own logits and value."""
        return self.enumerates and self.prior == "model" and self.leaf_value == "model"

    def _walker(self, tree: SearchTree, rule: SelectionRule) -> Walker:
        """The object that selects edges and adds nodes to the tree."""
        if self.kernels and (kernel := self.kernel("_walker")) is not None:
            return kernel(self, tree, rule) or TreeWalker(tree, rule)
        return TreeWalker(tree, rule)

    def _evaluate(self, state: ModelState) -> tuple[Tensor | None, Tensor, Tensor]:
        """Actions of the edges [roots, actions, action] where they are sampled, their logits, and the value."""
        simulator, roots = self.simulator, batch_size(state)
        if self._predicts:
            logits, value = simulator.predict(state)
            return None, logits.float(), value.float()
        if self.leaf_value == "model":
            value = simulator.value(state)
        else:
            noise = torch.randn(roots, self.rollout_length, self.layout.size, device=self.neutral.device)
            value = simulator.evaluate(state, self.layout.uniform(noise), self.discount).total
        value = value.float()
        if self.enumerates:
            uniform = value.new_zeros(roots, self.edges)
            logits = simulator.policy_logits(state).float() if self.prior == "model" else uniform
            return None, logits, value
        if self.prior == "model":
            actions = simulator.policy_samples(state, self.edges)
        else:
            actions = self.layout.uniform(torch.randn(roots, self.edges, self.layout.size, device=value.device))
        return actions.float(), value.new_zeros(roots, self.edges), value

    def _classes(self, roots: int) -> Float[Tensor, "roots actions action"]:
        size = self.layout.size
        return torch.eye(size, device=self.neutral.device).expand(roots, size, size)

    # The root ---------------------------------------------------------------------------------------------------------

    def _draw_root_noise(self, logits: Tensor, legal: Tensor | None) -> Float[Tensor, "roots actions"]:
        """Gumbel noise, or Dirichlet noise over the legal actions."""
        if self.rule == "gumbel":
            return -torch.empty_like(logits).exponential_().log()
        gamma = torch._standard_gamma(torch.full_like(logits, self.noise_alpha)).clamp(min=1e-30)
        gamma = gamma if legal is None else gamma * legal
        return gamma / gamma.sum(-1, keepdim=True)

    def _noisy_prior(self, logits: Tensor, noise: Tensor) -> Float[Tensor, "roots actions"]:
        return torch.softmax(logits, -1) * (1.0 - self.noise_share) + self.noise_share * noise

    def _result(self, tree: SearchTree, rule: SelectionRule, actions: Tensor) -> Search:
        root = tree.root
        if isinstance(rule, GumbelRule):
            transformed = rule.transformed(root)
            policy = rule.improved(root, transformed).masked_fill(~tree.legal, 0.0)
            chosen = rule.best(root, tree.legal, transformed, root.visits.amax(-1))
        else:
            policy = root.visits / root.visits.sum(-1, keepdim=True)
            chosen = root.visits.argmax(-1)
        return Search(tree, actions, chosen, policy.float(), root.value.float(), root.raw_value.float())

    # As a planner -----------------------------------------------------------------------------------------------------

    def initial_memory(self, num_envs: int) -> Memory:
        """Nothing is kept: the next decision searches anew from the true observation."""
        return {}

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        return {}

    def _plan(self, state: ModelState, memory: Memory, noise: Mapping[str, Tensor]) -> SearchPlan:
        return self.plan_from(self.search(state), memory)

    def plan_from(self, search: Search, memory: Memory) -> SearchPlan:
        """The plan that a search amounts to."""
        order = search.visits.argsort(dim=-1, descending=True, stable=True)
        rows = search.tree.rows
        chosen = search.actions[rows, search.chosen][:, None]
        return SearchPlan(
            actions=chosen, value=search.value, candidates=search.actions[:, :, None],
            returns=search.q.nan_to_num(nan=-torch.inf), elites=order[:, : min(10, self.edges)],
            std=torch.zeros_like(chosen), memory=memory, search=search,
        )  # fmt: skip

"""The tree search: known answers, masks, players, samples, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from tests.components.planner_models import CONTINUOUS, ValuedPull

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.mcts import MCTS
from rl_lab.components.planners.search_rules import PUCT, GumbelRule, halving_schedule, mixed_value
from rl_lab.components.planners.search_tree import Edges
from rl_lab.errors import ConfigError, DataError
from rl_lab.simulation.simulator import SimulatedStep, Simulator

THREE = ActionLayout(0, (3,))


class Chain(Simulator):
    """State n moves to n + 1 by action 1 and stays by the others; reaching 3 pays 1 and ends. Values are unknown."""

    has_value = has_logits = True

    def observe(self, observation, *, previous=None, action=None, is_first=None):
        return observation["place"]

    def step(self, state, action):
        following = state + action[:, 1:2]
        arrived = ((following >= 3.0) & (state < 3.0)).float()[:, 0]
        return SimulatedStep(following, arrived, (following < 3.0).float()[:, 0])

    def value(self, state):
        return torch.zeros(len(state))

    def policy_logits(self, state):
        return torch.zeros(len(state), 3)


class Sticks(Simulator):
    """Two players take one, two or three sticks; who takes the last one wins. Multiples of four are lost."""

    has_value = has_logits = True

    def observe(self, observation, *, previous=None, action=None, is_first=None):
        return observation["sticks"]

    def step(self, state, action):
        left = state - (action @ torch.tensor([1.0, 2.0, 3.0]))[:, None]
        won = ((left <= 0.0) & (state > 0.0)).float()[:, 0]
        return SimulatedStep(left.clamp(min=0.0), won, (left > 0.0).float()[:, 0])

    def value(self, state):
        return torch.zeros(len(state))

    def policy_logits(self, state):
        return torch.zeros(len(state), 3)


def planner(model: Simulator, layout: ActionLayout = THREE, **settings) -> MCTS:
    made = MCTS(action=layout, **settings)
    made.attach(model)
    return made


def edges(visits: list[float], returns: list[float], prior: list[float], value: float = 0.0) -> Edges:
    prior_ = torch.tensor([prior], dtype=torch.float64)
    parts = [torch.tensor([part], dtype=torch.float64) for part in (visits, returns)]
    bounds = torch.tensor([0.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    return Edges(prior_.log(), prior_, *parts, torch.tensor([value], dtype=torch.float64), *bounds)


def test_the_prior_decides_the_first_choice_and_a_bad_return_the_second() -> None:
    rule, legal = PUCT(), torch.ones(1, 2, dtype=torch.bool)
    assert int(rule.root(edges([0, 0], [0, 0], [0.6, 0.4]), legal)) == 0
    assert int(rule.root(edges([1, 0], [0, 0], [0.6, 0.4]), legal)) == 1


def test_sequential_halving_and_the_mixed_value_are_the_published_ones() -> None:
    assert halving_schedule(4, 16) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert halving_schedule(2, 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert halving_schedule(16, 32) == [0] * 16 + [1] * 8 + [2] * 4 + [3] * 4
    assert float(mixed_value(edges([3, 0], [3, 0], [0.5, 0.5]))) == pytest.approx(0.75)
    assert float(mixed_value(edges([0, 0], [0, 0], [0.5, 0.5], value=2.0))) == 2.0


def test_with_known_bounds_actions_of_equal_worth_keep_their_prior() -> None:
    """Returns 0.02 apart are all and nothing within the node, and a hundredth of the range of a game."""
    pair, noise = edges([2, 2], [0.04, 0.0], [0.5, 0.5]), torch.zeros(1, 2)
    rule = GumbelRule(noise=noise, simulations=8)
    within = rule.improved(pair, rule.transformed(pair))
    assert within[0, 0] == pytest.approx(1.0 / (1.0 + math.exp(-5.2)))
    rule = GumbelRule(noise=noise, simulations=8, bounds=(-1.0, 1.0))
    known = rule.improved(pair, rule.transformed(pair))
    assert known[0, 0] == pytest.approx(1.0 / (1.0 + math.exp(-0.052)))


@pytest.mark.parametrize("rule", ["puct", "gumbel"])
def test_the_search_finds_the_way_along_a_chain(rule: str) -> None:
    """Rewards are discounted by the steps they are away, and nothing follows the end."""
    search = planner(Chain(), simulations=60, rule=rule, discount=0.5).search(torch.tensor([[2.0], [1.0], [0.0]]))
    assert search.chosen.tolist() == [1, 1, 1]
    assert float(search.q[0, 1]) == 1.0
    assert float(search.tree.returns[1, search.tree.child[1, 0, 1], 1]) > 0.0
    assert search.visits.sum(-1).tolist() == [60, 60, 60]


@pytest.mark.parametrize("rule", ["puct", "gumbel"])
def test_two_players_want_opposite_things(rule: str) -> None:
    """With 5, 6 and 7 sticks the winning move leaves 4; a search that knows only the rules finds it."""
    made = planner(Sticks(), simulations=300, rule=rule, players=2, discount=1.0, value_bounds=(-1.0, 1.0))
    search = made.search(torch.tensor([[5.0], [6.0], [7.0], [4.0]]))
    assert search.chosen[:3].tolist() == [0, 1, 2]
    q = search.q[search.tree.rows, search.chosen]
    assert q[:3].min() > 0.0
    assert q[3] < 0.0


@pytest.mark.parametrize("rule", ["puct", "gumbel"])
def test_trees_do_not_know_of_each_other(rule: str) -> None:
    """A root is searched alike alone and among others, in any order; node k has one parent."""
    made = planner(Chain(), simulations=20, rule=rule, discount=0.9)
    state = torch.tensor([[2.0], [0.0], [1.0]])
    together, alone = made.search(state), [made.search(state[row : row + 1]) for row in range(3)]
    turned = made.search(state.flip(0))
    for row in range(3):
        assert torch.equal(together.tree.visits[row], alone[row].tree.visits[0])
        assert torch.equal(together.tree.visits[row], turned.tree.visits[2 - row])
    links = together.tree.child[together.tree.child > 0].view(3, -1)
    assert sorted(links[0].tolist()) == list(range(1, 21))


@pytest.mark.parametrize("rule", ["puct", "gumbel"])
def test_illegal_actions_are_never_visited(rule: str) -> None:
    legal = torch.tensor([[True, False, True]])
    for seed in range(5):
        torch.manual_seed(seed)
        search = planner(Chain(), simulations=12, rule=rule).search(torch.zeros(1, 1), legal=legal, explore=True)
        assert search.visits[0, 1] == 0.0
        assert search.policy[0, 1] == 0.0
        assert search.policy.sum() == pytest.approx(1.0)
        assert int(search.sample(1.0)) != 1
    with pytest.raises(DataError, match="no action"):
        planner(Chain(), simulations=2).search(torch.zeros(1, 1), legal=torch.zeros(1, 3, dtype=torch.bool))


def test_the_best_of_sampled_actions_is_found() -> None:
    """Continuous actions: what is visited most is among the best of the actions that were drawn."""
    torch.manual_seed(0)
    made = planner(
        ValuedPull(CONTINUOUS), CONTINUOUS, simulations=200, sampled_actions=8, prior="uniform", discount=0.05
    )
    state = torch.tensor([[0.8, -0.6], [-0.5, 0.5]])
    search = made.search(state)
    distance = (state[:, None] + search.actions).square().sum(-1)
    assert (distance[search.tree.rows, search.chosen] <= distance.quantile(0.25, -1)).all()
    plan = made.plan(state, {})
    assert plan.action.shape == (2, 2)
    assert plan.is_finite.all()


def test_a_model_without_value_or_policy_needs_to_be_told_what_to_do() -> None:
    class Bare(Chain):
        has_value = has_logits = False

    with pytest.raises(ConfigError, match="leaf_value=rollout"):
        planner(Bare())
    with pytest.raises(ConfigError, match="prior=uniform"):
        planner(Bare(), leaf_value="rollout")
    torch.manual_seed(0)
    made = planner(Bare(), leaf_value="rollout", prior="uniform", simulations=60, discount=0.5)
    assert made.search(torch.tensor([[2.0], [1.0]])).chosen.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"simulations": 0}, "simulations=0"),
        ({"players": 3}, "players=3"),
        ({"noise_share": 2.0}, "noise_share"),
        ({"value_bounds": (1.0, 1.0)}, "value_bounds"),
        ({"sampled_actions": 1}, "sampled_actions=1"),
        ({"action": CONTINUOUS}, "sampled_actions=20"),
    ],
)
def test_what_cannot_be_searched_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MCTS(**({"action": THREE} | settings))

"""The plain tree search equals mctx on recorded searches (benchmarks/record_mctx.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.mcts import MCTS
from rl_lab.simulation.simulator import SimulatedStep, Simulator

RECORDED = json.loads((Path(__file__).parent / "mctx_searches.json").read_text())


class LinearModel(Simulator):
    """The model that was recorded with: s' = tanh(transition[a] s), and everything else is read off linearly."""

    has_value = has_logits = True

    def __init__(self, weights: dict[str, list]) -> None:
        self.weights = {name: torch.tensor(value, dtype=torch.float32) for name, value in weights.items()}

    def observe(self, observation, *, previous=None, action=None, is_first=None):
        return observation["vector"]

    def step(self, state, action):
        matrix = torch.einsum("ba,aij->bij", action, self.weights["transition"])
        following = torch.tanh(torch.einsum("bij,bj->bi", matrix, state))
        alive = (following @ self.weights["end"] <= 0.8).float()
        return SimulatedStep(following, following @ self.weights["reward"], alive)

    def value(self, state):
        return state @ self.weights["value"]

    def policy_logits(self, state):
        return state @ self.weights["logits"]


@pytest.mark.parametrize("case", RECORDED["searches"], ids=lambda case: f"{case['kind']}-{case['seed']}")
def test_every_node_has_the_same_children_and_visits(case: dict) -> None:
    """Same model, same noise: the same trees, root values and policy targets."""
    model = LinearModel(RECORDED["models"][str(case["seed"])])
    start, invalid = model.weights["start"], model.weights["invalid"].bool()
    planner = MCTS(
        action=ActionLayout(0, (4,)), simulations=case["simulations"], rule=case["kind"], players=case["players"],
        discount=0.9, normalization="node", noise_share=0.0 if case["masked"] else 0.25,
    )  # fmt: skip
    planner.attach(model)
    noise, legal = torch.tensor(case["noise"]), ~invalid if case["masked"] else None
    search = planner.search(start, legal=legal, noise=noise)
    assert torch.equal(search.tree.visits, torch.tensor(case["visits"], dtype=torch.int32))
    assert torch.equal(search.tree.child, torch.tensor(case["child"], dtype=torch.int32))
    torch.testing.assert_close(search.value, torch.tensor(case["value"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(search.policy, torch.tensor(case["policy"]), rtol=1e-3, atol=1e-5)
    q = torch.tensor(case["q"])
    taken = search.visits > 0
    torch.testing.assert_close(search.q[taken], q[taken], rtol=1e-4, atol=1e-5)
    if "action" in case:
        assert search.chosen.tolist() == case["action"]

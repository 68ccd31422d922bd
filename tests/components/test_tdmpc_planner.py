"""TD-MPC's planner: one iteration against a literal reference, the draw of an elite, memory, schedules, discrete."""

from __future__ import annotations

import pytest
import torch
from tests.components.planner_models import CONTINUOUS, DISCRETE, BrokenPull, ValuedPull
from tests.packaged import adjusted

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.tdmpc import TDMPCPlanner
from rl_lab.errors import ConfigError

SMALL = {"samples": 32, "policy_samples": 4, "iterations": 3, "elites": 8}


def make(layout=CONTINUOUS, model=ValuedPull, **settings):
    planner = TDMPCPlanner(**adjusted("controllers/planners/tdmpc2", action=layout, **{**SMALL, **settings}))
    planner.attach(model(layout))
    return planner


@pytest.mark.parametrize("momentum", [0.0, 0.1])
def test_one_decision_follows_the_published_steps(momentum):
    """Elites by return, weights exp(0.5 (v - max)), the refit with its limits, the shifted mean, an elite's action."""
    torch.manual_seed(0)
    planner = make(momentum=momentum, iterations=2, discount=0.9)
    state = torch.tensor([[0.6, -0.4]])
    noise = planner.draw_noise(1)
    memory = planner.initial_memory(1)
    plan = planner.plan(state, memory, noise=noise)
    mean, std = torch.zeros(3, 2), torch.full((3, 2), 2.0)
    proposals = planner.policy_sequences(state)[0]
    for iteration in range(2):
        drawn = (mean + std * noise["candidates"][iteration, 0]).clamp(-1, 1)
        candidates = torch.cat([proposals, drawn])
        returns = []
        for sequence in candidates:
            x, total = state[0], 0.0
            for t in range(3):
                x = x + sequence[t]
                total += 0.9**t * -float(x.square().sum())
            returns.append(total + 0.9**3 * -float(x.square().sum()))
        values = torch.tensor(returns)
        best = values.argsort(descending=True)[:8]
        weight = torch.exp(0.5 * (values[best] - values.max()))
        weight = weight / weight.sum()
        fitted = sum(w * candidates[i] for w, i in zip(weight, best, strict=True))
        spread = sum(w * (candidates[i] - fitted) ** 2 for w, i in zip(weight, best, strict=True))
        mean, std = momentum * mean + (1 - momentum) * fitted, spread.sqrt().clamp(0.05, 2.0)
    chosen = candidates[best[(weight / noise["choice"][0]).argmax()]]
    torch.testing.assert_close(plan.actions[0], chosen)
    torch.testing.assert_close(plan.std[0], std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plan.memory["plan_mean"][0, :2], mean[1:], rtol=1e-4, atol=1e-5)
    assert not plan.memory["plan_mean"][0, 2].any()


def test_elites_are_drawn_by_their_weights():
    """Also when evaluated, the action is a draw: the best elite is not always played."""
    torch.manual_seed(0)
    planner = make(iterations=1, temperature=1e-6)
    state = torch.tensor([[0.6, -0.4]]).expand(400, 2)
    noise = planner.draw_noise(400)
    noise["candidates"] = noise["candidates"][:, :1].expand(-1, 400, -1, -1, -1)
    plan = planner.plan(state, planner.initial_memory(400), noise=noise)
    played = {tuple(action.tolist()) for action in plan.actions[:, 0]}
    assert len(played) == 8


@pytest.mark.parametrize("layout", [CONTINUOUS, DISCRETE])
def test_many_environments_are_planned_as_each_alone(layout):
    torch.manual_seed(0)
    planner, state = make(layout), torch.tensor([[0.6, -0.4], [-0.2, 0.9], [0.1, 0.1]])
    memory = planner.plan(state, planner.initial_memory(3)).memory
    noise = planner.draw_noise(3)
    together = planner.plan(state, memory, noise=noise)
    for env in range(3):
        own = {"candidates": noise["candidates"][:, env : env + 1], "choice": noise["choice"][env : env + 1]}
        past = {name: value[env : env + 1] for name, value in memory.items()}
        alone = planner.plan(state[env : env + 1], past, noise=own)
        torch.testing.assert_close(alone.actions[0], together.actions[env])
        torch.testing.assert_close(alone.memory["plan_mean"][0], together.memory["plan_mean"][env])


def test_discrete_plans_keep_every_class_possible():
    """Probabilities sum to 1 and have a floor; the best moves are found."""
    torch.manual_seed(0)
    planner = make(DISCRETE, samples=128, temperature=20.0, horizon=2)
    plan = planner.plan(torch.tensor([[0.5, -0.5]]), planner.initial_memory(1))
    assert plan.action[0].tolist() == [1, 0, 0, 0, 0, 1]
    kept = plan.memory["plan_mean"][0, 0].view(2, 3)
    torch.testing.assert_close(kept.sum(-1), torch.ones(2))
    assert float(kept.min()) >= 0.05 / 3 - 1e-6


def test_a_shorter_plan_keeps_the_shape_of_its_memory():
    """TD-MPC's horizon grows during training; the deviation's floor shrinks."""
    planner = make(horizon=5)
    planner.planned = 2
    planner.std_floor.fill_(0.5)
    plan = planner.plan(torch.zeros(2, 2), planner.initial_memory(2))
    assert plan.actions.shape == (2, 2, 2)
    assert plan.memory["plan_mean"].shape == (2, 5, 2)
    assert float(plan.std.min()) >= 0.5
    planner.planned = 3
    assert planner.plan(torch.zeros(2, 2), plan.memory).actions.shape == (2, 3, 2)


def test_candidates_that_are_not_finite_never_win():
    torch.manual_seed(0)
    planner = make(model=BrokenPull)
    plan = planner.plan(torch.zeros(4, 2), planner.initial_memory(4))
    assert bool((plan.action[:, 0] <= 0.0).all())
    assert bool(plan.value.isfinite().all())


def test_more_iterations_for_many_actions():
    for size, iterations in ((19, 6), (20, 8)):
        settings = adjusted("controllers/planners/tdmpc2", action=ActionLayout(size))
        assert TDMPCPlanner(**settings).iterations == iterations


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature=0"),
        ({"momentum": 1.0}, "momentum=1"),
        ({"elites": 33}, "elites=33"),
        ({"policy_samples": 40}, "policy_samples=40"),
        ({"horizon": 0}, "horizon=0"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)

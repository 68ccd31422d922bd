"""Planners on a quadratic with a known optimum, their memory, and what they refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.components.planner_models import CONTINUOUS, DISCRETE, MIXED, BrokenPull, Pull, ValuedPull
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_lab.components.planners.cem import CEM
from rl_lab.errors import ConfigError, NonFiniteError
from rl_lab.specs import ActionSpec

STARTS = {
    CONTINUOUS: [[0.6, -0.4], [-0.2, 0.9]],
    DISCRETE: [[0.5, -0.5], [0.0, 0.5]],
    MIXED: [[0.6, -0.5], [-0.3, 0.5]],
}
PLANNERS = {
    "cem": partial(CEM, samples=128, elites=12, iterations=8),
    "cem_best": partial(CEM, samples=128, elites=12, iterations=8, execute="best"),
}


def make(name, layout, model=Pull, **settings):
    planner = PLANNERS[name](action=layout, **{"horizon": 3, **settings})
    planner.attach(model(layout))
    return planner


def start(layout):
    return torch.tensor(STARTS[layout])


@pytest.mark.parametrize("layout", [CONTINUOUS, DISCRETE, MIXED], ids=["continuous", "discrete", "mixed"])
@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_finds_the_best_first_move(name, layout):
    """-x is the best move in every environment of the batch, whatever the actions are made of."""
    torch.manual_seed(0)
    planner, state = make(name, layout), start(layout)
    plan = planner.plan(state, planner.initial_memory(2))
    move = planner.simulator.move(plan.action)
    torch.testing.assert_close(move, -state, atol=0.1, rtol=0.0)
    assert (plan.value > -0.3).all()


@pytest.mark.parametrize("name", PLANNERS)
def test_environments_are_planned_apart(name):
    """One call for many environments gives what a call for each would, under the same noise."""
    planner, state = make(name, CONTINUOUS), start(CONTINUOUS)
    noise = planner.draw_noise(2)
    together = planner.plan(state, planner.initial_memory(2), noise=noise).actions
    for env in range(2):
        own = {key: value.narrow(value.ndim - 4, env, 1) for key, value in noise.items()}
        alone = planner.plan(state[env : env + 1], planner.initial_memory(1), noise=own).actions
        torch.testing.assert_close(alone[0], together[env])


@pytest.mark.parametrize("name", PLANNERS)
def test_zeros_are_no_memory(name):
    """An environment whose memory was cleared plans as at its first decision, the others go on from their plan."""
    planner, state = make(name, CONTINUOUS, iterations=1), start(CONTINUOUS)
    noise = planner.draw_noise(2)
    first = planner.plan(state, planner.initial_memory(2), noise=noise)
    keep = torch.tensor([0.0, 1.0])
    memory = {key: value * keep.view(2, *[1] * (value.ndim - 1)) for key, value in first.memory.items()}
    second = planner.plan(state, memory, noise=noise)
    torch.testing.assert_close(second.candidates[0], first.candidates[0])
    assert not torch.allclose(second.candidates[1], first.candidates[1])


@pytest.mark.parametrize("name", PLANNERS)
def test_a_candidate_that_is_not_finite_never_wins(name):
    """NaN counts as -inf, even where all finite returns are negative, and does not spoil the refit."""
    torch.manual_seed(0)
    planner = make(name, CONTINUOUS, BrokenPull)
    plan = planner.plan(torch.tensor([[-0.6, 0.0], [0.6, 0.0]]), planner.initial_memory(2))
    assert plan.actions.isfinite().all()
    assert (plan.returns == -torch.inf).any()
    assert (plan.returns.gather(1, plan.elites)[:, 0] < 0.0).all()
    plan.require_finite()


@pytest.mark.parametrize("name", PLANNERS)
def test_a_model_that_is_never_finite_is_an_error(name):
    """All candidates NaN: the search distribution stays as it was, and asking says so."""
    planner = make(name, CONTINUOUS)
    plan = planner.plan(torch.full((1, 2), torch.nan), planner.initial_memory(1))
    assert plan.actions.isfinite().all()
    with pytest.raises(NonFiniteError, match="environment 0"):
        plan.require_finite()


@pytest.mark.parametrize("layout", [CONTINUOUS, MIXED], ids=["continuous", "mixed"])
@pytest.mark.parametrize("name", PLANNERS)
def test_a_plan_never_waits_for_the_device(name, layout):
    """No value is read back: a plan runs on tensors without data, so that it can be captured as a graph."""
    planner = make(name, layout)
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan = planner.plan(torch.zeros(2, 2), planner.initial_memory(2))
    assert plan.action.shape == (2, layout.size)


def test_the_value_at_the_horizon_counts():
    """bootstrap: the model's value is added where it has one, and left out on demand."""
    layout, state = CONTINUOUS, start(CONTINUOUS)
    candidates = torch.zeros(2, 1, 3, 2)
    rewards = make("cem", layout, ValuedPull, bootstrap="never").score(state, candidates)
    with_value = make("cem", layout, ValuedPull, discount=0.5).score(state, candidates)
    cost = -state.square().sum(-1, keepdim=True)
    torch.testing.assert_close(rewards, 3 * cost)
    torch.testing.assert_close(with_value, (1 + 0.5 + 0.25 + 0.125) * cost)


def test_rewards_stop_where_the_episode_does():
    """A reward counts with the probability that the episode has gone on until then."""

    class Ends(Pull):
        def step(self, state, action):
            step = super().step(state, action)
            return step._replace(reward=torch.ones_like(step.reward), continuation=torch.full_like(step.reward, 0.5))

    scores = make("cem", CONTINUOUS, Ends).score(start(CONTINUOUS), torch.zeros(2, 5, 3, 2))
    torch.testing.assert_close(scores, torch.full((2, 5), 1.75))


def test_cem_is_planets():
    """With PlaNet's settings an iteration is: clip, the best, their mean, sqrt(variance + 1e-6); the mean is played."""
    planner = make("cem", CONTINUOUS, horizon=3, samples=20, elites=5, iterations=2, init_std=1.0, momentum=0.0,
                   warm_start=False)  # fmt: skip
    state, noise = start(CONTINUOUS)[:1], planner.draw_noise(1)
    mean, std = torch.zeros(3, 2), torch.ones(3, 2)
    for draws in noise["candidates"]:
        candidates = (mean + std * draws[0]).clamp(-1.0, 1.0)
        order = sorted(range(20), key=lambda k: -float(planner.score(state, candidates[None])[0, k]))
        chosen = candidates[order[:5]]
        mean, std = chosen.mean(0), (chosen.var(0, unbiased=False) + 1e-6).sqrt()
    memory = planner.plan(state, planner.initial_memory(1)).memory  # of another decision: it must not matter
    torch.testing.assert_close(planner.plan(state, memory, noise=noise).action[0], mean[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"horizon": 0}, "horizon=0"),
        ({"elites": 129}, "elites=129, samples=128"),
        ({"samples": 0}, "samples=0"),
        ({"discount": 0.0}, "discount=0.0"),
        ({"init_std": 0.0}, "init_std=0.0"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    """A planner that cannot plan is not built, and the message names the setting."""
    with pytest.raises(ConfigError, match=words):
        PLANNERS["cem"](action=CONTINUOUS, **settings)


def test_a_model_without_what_the_planner_needs_is_refused():
    """No rewards, or no value where it must bootstrap: said when the model is attached."""

    class Mute(Pull):
        has_reward = False

    with pytest.raises(ConfigError, match="needs rewards, but Mute"):
        make("cem", CONTINUOUS, Mute)
    with pytest.raises(ConfigError, match="bootstrap=always, but Pull predicts no value"):
        make("cem", CONTINUOUS, bootstrap="always")
    with pytest.raises(ConfigError, match="No simulator is attached"):
        PLANNERS["cem"](action=CONTINUOUS).plan(start(CONTINUOUS), {})


def test_layouts_follow_the_action_space():
    """A box is continuous entries, (multi-)discrete actions are one-hots, as the codec encodes them."""
    assert CEM(action=ActionSpec("continuous", (2, 3))).layout.size == 6
    assert CEM(action={"kind": "discrete", "shape": [2], "classes": [3, 4]}).layout.classes == (3, 4)

"""Planners on a quadratic with a known optimum, their memory, and what they refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.components.planner_models import CONTINUOUS, DISCRETE, MIXED, BrokenPull, Pull, ValuedPull, make_planner
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.colored_noise import noise_filter
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.planners.icem import ICEM
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.components.planners.random_shooting import RandomShooting
from rl_lab.errors import ConfigError, NonFiniteError
from rl_lab.simulation.simulator import SimulatedStep
from rl_lab.specs import ActionSpec

STARTS = {
    CONTINUOUS: [[0.6, -0.4], [-0.2, 0.9]],
    DISCRETE: [[0.5, -0.5], [0.0, 0.5]],
    MIXED: [[0.6, -0.5], [-0.3, 0.5]],
}
PLANNERS = {
    "cem": partial(make_planner, CEM, samples=128, elites=12, iterations=8),
    "cem_best": partial(make_planner, CEM, samples=128, elites=12, iterations=8, execute="best"),
    "icem": partial(make_planner, ICEM, samples=128, elites=12, iterations=8, noise_beta=0.5),
    "random_shooting": partial(make_planner, RandomShooting, samples=2_000, horizon=1),
    "mppi": partial(make_planner, MPPI, samples=256, iterations=8, temperature=0.2, elites=32, min_std=0.02),
    "mppi_plain": partial(make_planner, MPPI, samples=512, iterations=8, temperature=0.01, std=0.3),
    "policy_guided": partial(
        make_planner, PolicyGuided, samples=256, policy_samples=8, iterations=8, elites=24, temperature=0.2
    ),
    "gradient": partial(make_planner, GradientPlanner, restarts=3, iterations=40),
    "diffusion": partial(
        make_planner, DiffusionPlanner, samples=1_000, scored=16, steps=16, std=0.5, beta=300.0, execute="best"
    ),
    "diffusion_gradient": partial(
        make_planner, DiffusionPlanner, steering="gradient", std=0.5, steps=24, beta=300.0, execute="best"
    ),
    "diffusion_annealed": partial(make_planner, DiffusionPlanner, steering="annealed", samples=256, steps=10),
}


def make(name, layout, model=None, **settings):
    model = model or (ValuedPull if name == "policy_guided" else Pull)
    planner = PLANNERS[name](action=layout, **({} if name == "random_shooting" else {"horizon": 3}) | settings)
    planner.attach(model(layout))
    return planner


def few_rounds(name, count):
    """As few iterations as a test needs."""
    return {"steps": count, "scored": count} if name.startswith("diffusion") else {"iterations": count}


def start(layout):
    return torch.tensor(STARTS[layout])


def layouts_of(name):
    return [CONTINUOUS] if name.endswith("gradient") else [CONTINUOUS, DISCRETE, MIXED]


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in PLANNERS for layout in layouts_of(name)])
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
    few = {} if name == "random_shooting" else {"horizon": 3} | few_rounds(name, 1)
    planner, state = make(name, CONTINUOUS, **few), start(CONTINUOUS)
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


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in PLANNERS for layout in layouts_of(name)])
def test_a_plan_never_waits_for_the_device(name, layout):
    """No value is read back: a plan runs on tensors without data, so that it can be captured as a graph."""
    planner = make(name, layout, **({} if name == "random_shooting" else {"horizon": 2} | few_rounds(name, 2)))
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


@pytest.mark.parametrize("includes", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_reward_counts_once(includes, step):
    """One reward at a known step of a chain scores γ^(step - 1), whether V(s) begins with the reward of s (Dreamer v1
    and v2) or with that of the next step."""
    discount, horizon = 0.95, 3

    class Chain(Pull):
        """The state is the time; arriving at `step` pays 1."""

        has_value = True
        value_includes_reward = includes

        def reward(self, time):
            return (time == step).float()

        def step(self, state, action):
            state = state + 1
            return SimulatedStep(state, self.reward(state[:, 0]), torch.ones(len(state)))

        def value(self, state):
            following = sum(discount**ahead * self.reward(state[:, 0] + ahead + 1) for ahead in range(5))
            return self.reward(state[:, 0]) + discount * following if includes else following

    planner = make("cem", CONTINUOUS, Chain, horizon=horizon, discount=discount)
    score = planner.score(torch.zeros(1, 2), torch.zeros(1, 1, horizon, 2))
    assert score.item() == pytest.approx(discount ** (step - 1))


def test_the_discount_is_the_models_unless_it_is_set():
    """A planner that is put on a trained model counts as that model's values were learned."""

    class Discounted(ValuedPull):
        discount = 0.9

    assert make("cem", CONTINUOUS, Discounted).discount == 0.9
    assert make("cem", CONTINUOUS, Discounted, discount=0.5).discount == 0.5
    state, candidates = start(CONTINUOUS), torch.zeros(2, 1, 3, 2)
    score = make("cem", CONTINUOUS, Discounted).score(state, candidates)
    cost = -state.square().sum(-1, keepdim=True)
    torch.testing.assert_close(score, (1 + 0.9 + 0.81 + 0.729) * cost)


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
    assert make_planner(CEM, action=ActionSpec("continuous", (2, 3))).layout.size == 6
    assert make_planner(CEM, action={"kind": "discrete", "shape": [2], "classes": [3, 4]}).layout.classes == (3, 4)


@pytest.mark.parametrize(
    ("planner", "settings", "words"),
    [
        (GradientPlanner, {"action": DISCRETE}, "needs continuous actions"),
        (GradientPlanner, {"action": MIXED}, "needs continuous actions"),
        (GradientPlanner, {"restarts": 0}, "restarts=0"),
        (MPPI, {"temperature": 0.0}, "temperature=0.0"),
        (MPPI, {"min_std": 2.0}, "min_std=2.0"),
        (ICEM, {"keep": 1.5}, "keep=1.5"),
        (ICEM, {"noise_beta": -1.0}, "noise_beta=-1.0"),
        (PolicyGuided, {"policy_samples": 0}, "policy_samples=0"),
        (RandomShooting, {"samples": 0}, "samples=0"),
    ],
)
def test_wrong_settings_of_the_other_planners_are_refused(planner, settings, words):
    """Each planner names the setting that it cannot plan with."""
    with pytest.raises(ConfigError, match=words):
        make_planner(planner, **{"action": CONTINUOUS} | settings)


def test_models_that_a_planner_cannot_use_are_refused():
    """A policy-guided planner needs a policy and a value; a gradient one a model that torch can see through."""

    class Opaque(Pull):
        def step(self, state, action):
            return super().step(state, action.detach())

    with pytest.raises(ConfigError, match="predicts no value"):
        make("policy_guided", CONTINUOUS, Pull)
    with pytest.raises(ConfigError, match="follows the model's policy, but Pull has none"):
        make("policy_guided", CONTINUOUS, Pull, bootstrap="never")
    planner = make("gradient", CONTINUOUS, Opaque)
    with pytest.raises(ConfigError, match="cannot see through Opaque"):
        planner.plan(start(CONTINUOUS), planner.initial_memory(2))


def test_the_gradient_planner_plans_where_gradients_are_off():
    """Acting runs in inference mode; the planner switches gradients on for itself, and leaves none on the model."""
    planner = make("gradient", CONTINUOUS)
    with torch.inference_mode():
        plan = planner.plan(start(CONTINUOUS), planner.initial_memory(2))
    torch.testing.assert_close(plan.action, -start(CONTINUOUS), atol=0.1, rtol=0.0)
    assert not plan.action.requires_grad


def test_icem_takes_its_elites_along():
    """The best sequences of a decision, one step on, are candidates of the next."""
    planner = make("icem", CONTINUOUS)
    first = planner.plan(start(CONTINUOUS), planner.initial_memory(2))
    settings = {"iterations": 1, "samples": 128, "elites": 12}
    single = make_planner(ICEM, action=CONTINUOUS, horizon=3, **settings)
    single.attach(planner.simulator)
    second = single.plan(start(CONTINUOUS), first.memory)
    best = first.candidates[torch.arange(2), first.elites[:, 0]]
    torch.testing.assert_close(second.candidates[:, 0, :-1], best[:, 1:])


def test_policy_sequences_compete():
    """The candidates of a policy-guided plan begin with what the policy would do."""
    planner = make("policy_guided", CONTINUOUS)
    plan = planner.plan(start(CONTINUOUS), planner.initial_memory(2))
    torch.testing.assert_close(plan.candidates[:, :8, 0], start(CONTINUOUS)[:, None].expand(2, 8, 2))


@pytest.mark.parametrize(("beta", "correlation"), [(0.0, 0.0), (1.0, 0.49), (2.0, 0.80), (3.0, 0.91)])
def test_coloured_noise_is_slow_and_has_variance_one(beta, correlation):
    """Neighbouring steps of a horizon of 20 correlate the more, the higher beta is."""
    torch.manual_seed(0)
    noise = noise_filter(20, beta) @ torch.randn(20, 20_000)
    torch.testing.assert_close(noise.square().mean(), torch.tensor(1.0), atol=0.03, rtol=0.0)
    assert (noise[1:] * noise[:-1]).mean().item() == pytest.approx(correlation, abs=0.1)


def test_particles_are_averaged():
    """A candidate's return is the mean over its particles, which the model may treat differently."""

    class Spread(Pull):
        def spread(self, state, candidates, particles=1):
            rows = super().spread(state, candidates, particles)
            return rows + torch.arange(particles).repeat(len(rows) // particles)[:, None]

    planner = make("cem", CONTINUOUS, Spread, particles=3)
    score = planner.score(torch.zeros(1, 2), torch.zeros(1, 1, 1, 2))
    assert score.item() == pytest.approx(-(0 + 2 + 8) / 3)

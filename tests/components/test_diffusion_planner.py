"""The diffusion planner draws from p0·exp(βR): closed forms, the prior at β = 0, weights, and what it refuses."""

from __future__ import annotations

from math import log

import pytest
import torch
from tests.components.planner_models import CONTINUOUS, DISCRETE, Pull, make_planner

from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.particles import (
    effective_sample_size,
    kl_from_prior,
    reweight,
    systematic,
    uniform_log_weights,
)
from rl_lab.errors import ConfigError

STD, BETA = 0.2, 15.0  # narrow: the box cuts nothing off
STATE = torch.tensor([[0.3, -0.1], [-0.2, 0.15]])
WAYS = ["smc", "gradient", "annealed"]


def make(steering="smc", *, model=Pull, layout=CONTINUOUS, **settings):
    given = {"horizon": 1, "std": STD, "beta": BETA, "standardize": False, "steering": steering} | settings
    planner = make_planner(DiffusionPlanner, action=layout, **given)
    planner.attach(model(layout))
    return planner


def plan(planner, state=STATE, **arguments):
    return planner.plan(state, planner.initial_memory(len(state)), **arguments)


def posterior():
    """Mean, variance, ln Z and KL(p ‖ p0) for a prior N(0, s²) on each entry and R = -Σ (x + a)²."""
    variance = 1.0 / (1.0 / STD**2 + 2.0 * BETA)
    mean = -2.0 * BETA * variance * STATE
    log_z = (0.5 * log(variance / STD**2) - BETA * STATE**2 + 0.5 * mean**2 / variance).sum(1)
    kl = (0.5 * (variance + mean**2) / STD**2 - 0.5 - 0.5 * log(variance / STD**2)).sum(1)
    return mean, variance, log_z, kl


@pytest.mark.parametrize("settings", [{"scored": 1}, {"scored": 5, "steps": 10}, {"scored": 4, "resample_below": 1.0}])
def test_smc_draws_from_the_posterior(settings):
    """A normal prior and a quadratic return make a normal posterior: mean, variance and KL are its own."""
    torch.manual_seed(0)
    planner = make(samples=20_000, **settings)
    found, (mean, variance, _, kl) = plan(planner), posterior()
    weights = found.weights[:, :, None]
    drawn = found.candidates[:, :, 0]
    torch.testing.assert_close((weights * drawn).sum(1), mean, atol=0.01, rtol=0.0)
    spread = (weights * (drawn - mean[:, None]).square()).sum(1)
    torch.testing.assert_close(spread, torch.full_like(spread, variance), atol=0.0, rtol=0.08)
    torch.testing.assert_close(found.kl, kl, atol=0.05, rtol=0.0)


def test_guidance_with_its_weights_draws_from_the_posterior():
    """The shift is approximate; the weights, which undo it, make mean and variance exact."""
    torch.manual_seed(0)
    found, (mean, variance, _, kl) = plan(make("gradient", samples=20_000, steps=12)), posterior()
    weights, drawn = found.weights[:, :, None], found.candidates[:, :, 0]
    torch.testing.assert_close((weights * drawn).sum(1), mean, atol=0.01, rtol=0.0)
    spread = (weights * (drawn - mean[:, None]).square()).sum(1)
    torch.testing.assert_close(spread, torch.full_like(spread, variance), atol=0.0, rtol=0.08)
    torch.testing.assert_close(found.kl, kl, atol=0.05, rtol=0.0)


def test_guidance_needs_fewer_samples_than_reweighting():
    """Shifted draws lie where the return is high: more of them carry weight."""
    torch.manual_seed(0)
    guided, plain = plan(make("gradient", samples=4_000, steps=12)), plan(make(samples=4_000, scored=1))
    assert (guided.effective_samples > 1.5 * plain.effective_samples).all()


def test_annealing_finds_the_mean_of_the_posterior():
    """Without a learned prior: the plan is the posterior's mean."""
    torch.manual_seed(0)
    found, (mean, *_) = plan(make("annealed", samples=4_000, steps=10)), posterior()
    torch.testing.assert_close(found.action, mean, atol=0.02, rtol=0.0)


@pytest.mark.parametrize("steering", ["smc", "gradient"])
def test_without_beta_the_prior_comes_back(steering):
    """β = 0: the draws are those of the prior under the same noise, all weigh the same, and nothing was learned."""
    planner = make(steering, beta=0.0, samples=5_000, steps=4, scored=3, horizon=2)
    noise = planner.draw_noise(2)
    found, prior = plan(planner, noise=noise), planner._prior(planner.initial_memory(2), STATE, None)
    x, *draws = noise["steps"].flatten(1, 2)
    for index, draw in enumerate(draws):
        mean, std = prior.kernel(x, prior.clean(x, index), index)
        x = mean + std * draw
    torch.testing.assert_close(found.candidates, (STD * x).clamp(-1.0, 1.0).unflatten(0, (2, -1)))
    torch.testing.assert_close(found.effective_samples, torch.full((2,), 5_000.0))
    torch.testing.assert_close(found.kl, torch.zeros(2), atol=1e-5, rtol=0.0)
    assert found.candidates.std().item() == pytest.approx(STD, rel=0.02)
    assert found.candidates.mean().item() == pytest.approx(0.0, abs=0.01)


def test_without_beta_annealing_stays_at_the_priors_mean():
    """Equal weights leave the plan where it was, whatever the draws are."""
    planner = make("annealed", beta=0.0, horizon=3)
    found = plan(planner)
    torch.testing.assert_close(found.actions, torch.zeros(2, 3, 2), atol=1e-6, rtol=0.0)
    memory = {"plan_mean": torch.full((2, 3, 2), 0.3), "plan_known": torch.ones(2)}
    torch.testing.assert_close(planner.plan(STATE, memory).actions, torch.full((2, 3, 2), 0.3))


def test_one_level_of_annealing_is_mppi():
    """From all noise at once the weighted mean is MPPI's with temperature 1 / β, but for the mean of the draws."""
    annealed = make("annealed", steps=1, scored=1, samples=64, horizon=2)
    mppi = make_planner(MPPI, action=CONTINUOUS, horizon=2, samples=64, iterations=1, std=STD, temperature=1.0 / BETA)
    mppi.attach(Pull(CONTINUOUS))
    noise = annealed.draw_noise(2)
    ours = plan(annealed, noise=noise).actions
    theirs = mppi.plan(STATE, mppi.initial_memory(2), noise={"candidates": noise["steps"][:1]}).actions
    torch.testing.assert_close(ours + STD * noise["steps"][0].mean(1), theirs)


def test_more_beta_is_more_return():
    """Expected return rises with β, and so does the price in nats; effective samples fall."""
    found = []
    for beta in (0.0, 1.0, 4.0, 16.0):
        torch.manual_seed(0)
        found.append(plan(make(beta=beta, samples=2_000, scored=1, execute="mean")))
    value, kl, few = (
        torch.stack([getattr(part, name) for part in found]) for name in ("value", "kl", "effective_samples")
    )
    assert (value.diff(dim=0) > 0).all()
    assert (kl.diff(dim=0) > 0).all()
    assert (few.diff(dim=0) < 0).all()


def test_standardised_returns_make_beta_free_of_scale():
    """Rewards a hundred times as large change nothing."""

    class Rich(Pull):
        def step(self, state, action):
            step = super().step(state, action)
            return step._replace(reward=100.0 * step.reward)

    for steering in WAYS:
        planners = [make(steering, model=model, standardize=True, beta=3.0) for model in (Pull, Rich)]
        noise = planners[0].draw_noise(2)
        plain, rich = (plan(planner, noise=noise) for planner in planners)
        torch.testing.assert_close(rich.actions, plain.actions, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(rich.weights, plain.weights, atol=1e-4, rtol=1e-2)


def test_two_modes_are_kept():
    """Left and right are equally good, the middle is not: samples go both ways, and none through the middle."""

    class Fork(Pull):
        def step(self, state, action):
            step = super().step(state, action)
            return step._replace(reward=-(action[:, 0].abs() - 0.5).square() * 50.0)

    torch.manual_seed(0)
    layout = ActionLayout(1)
    planner = make(model=Fork, layout=layout, std=0.5, beta=1.0, samples=200, steps=8, scored=4)
    actions = plan(planner, torch.zeros(300, 1)).action
    assert 0.4 < (actions > 0).float().mean() < 0.6
    assert (actions.abs() > 0.2).float().mean() > 0.97


def test_effective_samples_and_evidence_are_their_formulas():
    """1 / Σ w², ln mean exp(tilt) and Σ w·tilt - ln Z, on numbers that can be followed by hand."""
    tilt = torch.tensor([[0.0, log(3.0)], [0.0, 0.0]])
    log_weights, evidence = reweight(uniform_log_weights(2, 2, tilt), tilt)
    torch.testing.assert_close(log_weights.exp(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    torch.testing.assert_close(evidence, torch.tensor([log(2.0), 0.0]))
    torch.testing.assert_close(effective_sample_size(log_weights), torch.tensor([1.6, 2.0]))
    kl = kl_from_prior(log_weights, tilt, evidence)
    torch.testing.assert_close(kl, torch.tensor([0.75 * log(3.0) - log(2.0), 0.0]))


def test_dead_particles_stay_dead():
    """-inf takes a particle's weight; where all die, the weights stay and the evidence says so."""
    tilt = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]])
    log_weights, evidence = reweight(uniform_log_weights(2, 2, tilt), tilt)
    torch.testing.assert_close(log_weights.exp(), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert evidence.tolist() == [pytest.approx(-log(2.0)), -torch.inf]


def test_systematic_resampling_keeps_the_shares():
    """A particle with weight w comes back floor(Nw) or ceil(Nw) times."""
    weights = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).repeat(5, 50) / 50
    chosen = systematic(weights.log(), torch.tensor([0.01, 0.27, 0.51, 0.93, 0.99]))
    for row in chosen:
        counts = row.bincount(minlength=200)
        assert counts.sum() == 200
        assert ((counts - 200 * weights[0]).abs() < 1.0).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": -1.0}, "beta=-1.0"),
        ({"samples": 0}, "samples=0"),
        ({"scored": 12}, "scored=12"),
        ({"resample_below": 2.0}, "resample_below=2.0"),
        ({"std": 0.0}, "std=0.0"),
        ({"steering": "gradient", "layout": DISCRETE}, "needs continuous actions"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    """A planner that cannot plan is not built, and the message names the setting."""
    with pytest.raises(ConfigError, match=words):
        make(**settings)


def test_a_model_without_gradients_is_refused():
    """Guidance needs a model that torch can see through."""

    class Opaque(Pull):
        def step(self, state, action):
            return super().step(state, action.detach())

    with pytest.raises(ConfigError, match="cannot see through Opaque"):
        plan(make("gradient", model=Opaque))

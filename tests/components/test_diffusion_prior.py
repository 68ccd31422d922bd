"""A learned prior over action sequences: how it learns, what it hands to the planner, and how the planner steers it."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from tests.components.planner_models import CONTINUOUS, Pull, make_planner
from tests.packaged import adjusted

from rl_lab.components.diffusion import Denoiser, DiffusionModel, NoiseSchedule
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.components.planners.diffusion_prior import DiffusionPrior
from rl_lab.errors import ConfigError, DataError
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec

STD, BETA = 0.25, 8.0
STATE = torch.tensor([[0.3, -0.1], [-0.2, 0.15]])
VECTOR = {"vector": ObservationSpec("vector", (2,), "float32")}
ACTION = ActionSpec("continuous", (2,))


class NormalDenoiser(Denoiser):
    """The exact noise of data a ~ N(half the condition, STD²)."""

    def __init__(self, schedule: NoiseSchedule) -> None:
        super().__init__()
        self.schedule = schedule

    def forward(self, noisy, level, condition=None):
        signal = self.schedule.signal[level][:, None, None]
        mean = 0.5 * condition[:, None]
        gain = STD**2 * signal / (STD**2 * signal**2 + 1.0 - signal**2)
        clean = mean + gain * (noisy - signal * mean)
        return (noisy - signal * clean) / (1.0 - signal**2).sqrt()


class NormalPrior(DiffusionPrior):
    """A prior that has learned everything: its model is exact and its condition the observation itself."""

    def __init__(self, levels: int = 200) -> None:
        super().__init__(**settings(horizon=1, levels=levels))
        schedule = NoiseSchedule(levels=levels)
        self.average.model = DiffusionModel(network=NormalDenoiser(schedule), schedule=schedule, clip=None)

    def _condition(self, observation):
        return observation["vector"]


def settings(**further):
    given = {"observation": VECTOR, "action": ACTION, "horizon": 4, "network_settings": {"units": 16, "layers": 1}}
    return adjusted("controllers/priors/diffusion", **given | further)


def make(prior, steering="smc", **further):
    given = {"horizon": prior.horizon, "beta": BETA, "standardize": False, "steering": steering, "steps": 200} | further
    planner = make_planner(DiffusionPlanner, action=CONTINUOUS, prior=prior, **given)
    planner.attach(Pull(CONTINUOUS))
    return planner


def plan(planner, **arguments):
    return planner.plan(STATE, planner.initial_memory(2), observation={"vector": STATE}, **arguments)


def batch(time: int = 4, rows: int = 3, ends: dict[int, int] | None = None) -> SequenceBatch:
    """`ends`: the time of the last record of an episode, by row."""
    no = torch.zeros(rows, time, dtype=torch.bool)
    is_last = no.clone()
    for row, end in (ends or {}).items():
        is_last[row, end] = True
    torch.manual_seed(0)
    action = torch.rand(rows, time, 2) * 2 - 1
    return SequenceBatch({"vector": torch.randn(rows, time, 2)}, action, torch.zeros(rows, time), no, is_last, no)


@pytest.mark.parametrize(("steering", "scored"), [("smc", 1), ("smc", 4), ("gradient", 1)])
def test_the_posterior_of_an_exact_prior_is_drawn(steering: str, scored: int) -> None:
    """N(m, s²) and R = -Σ(x + a)² make a normal posterior; the prior's own mean depends on the observation."""
    torch.manual_seed(0)
    found = plan(make(NormalPrior(), steering, samples=4_000, scored=scored))
    variance = 1.0 / (1.0 / STD**2 + 2.0 * BETA)
    mean = variance * (0.5 * STATE / STD**2 - 2.0 * BETA * STATE)
    weights, drawn = found.weights[:, :, None], found.candidates[:, :, 0]
    torch.testing.assert_close((weights * drawn).sum(1), mean, atol=0.02, rtol=0.0)
    spread = (weights * (drawn - mean[:, None]).square()).sum(1)
    torch.testing.assert_close(spread, torch.full_like(spread, variance), atol=0.0, rtol=0.15)


@pytest.mark.parametrize("steering", ["smc", "gradient"])
def test_without_beta_the_learned_prior_comes_back(steering: str) -> None:
    """β = 0: the same draws as the reverse process of DDPM makes from the same noise, all of one weight."""
    torch.manual_seed(0)
    prior = DiffusionPrior(**settings(action=ACTION))
    planner = make(prior, steering, beta=0.0, samples=64, steps=5, scored=2)
    noise = planner.draw_noise(2)
    found = plan(planner, noise=noise)
    drawn = prior.given({"vector": STATE}, candidates=64, steps=5)
    x, *draws = noise["steps"].flatten(1, 2)
    for index, draw in enumerate(draws):
        mean, std = drawn.kernel(x, drawn.clean(x, index), index)
        x = mean + std * draw
    torch.testing.assert_close(found.candidates, x.clamp(-1.0, 1.0).unflatten(0, (2, -1)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.effective_samples, torch.full((2,), 64.0))


def test_the_model_predicts_the_observation_of_a_dream() -> None:
    """Without an observation the prior sees what the model says of the state; a model that says nothing is refused."""

    class Seeing(Pull):
        has_observation = True

        def observation(self, state):
            return {"vector": state}

    planner = make(NormalPrior(), samples=8, steps=5)
    with pytest.raises(ConfigError, match="Pull predicts none"):
        planner.plan(STATE, planner.initial_memory(2))
    planner.attach(Seeing(CONTINUOUS))
    noise = planner.draw_noise(2)
    dreamed = planner.plan(STATE, planner.initial_memory(2), noise=noise)
    torch.testing.assert_close(dreamed.candidates, plan(planner, noise=noise).candidates)


def test_actions_after_an_episodes_end_do_not_count() -> None:
    """The record that ends an episode has no action, and what follows it belongs to another one."""
    prior = DiffusionPrior(**settings())
    prior.fitted.fill_(True)
    cut, other = batch(ends={1: 2}), batch(ends={1: 2})
    other.action[1, 2:] = 0.5
    torch.manual_seed(1)
    loss = prior.loss(cut)[0]
    assert prior._taken(cut).tolist() == [[True] * 4, [True, True, False, False], [True] * 4]
    weights = [p for p in prior.model.parameters() if p.requires_grad]
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, weights))
    mask = torch.randn(3, 4, 2)
    prior.model.loss = lambda x0, condition, *, weight: (weight * x0 * mask).sum()
    assert prior.loss(cut)[0] == prior.loss(other)[0]


def test_it_learns_what_was_done_and_draws_with_the_averaged_weights() -> None:
    """The action is the sign of the first entry of the observation; after some updates the draws have that sign."""
    torch.manual_seed(0)
    prior = DiffusionPrior(**settings(horizon=2, network_settings={"units": 32, "layers": 2}, max_decay=0.9))
    optimizer = torch.optim.Adam([p for p in prior.parameters() if p.requires_grad], 3e-3)
    for _ in range(200):
        seen = torch.randn(128, 2, 2)
        action = 0.8 * seen[:, :1].sign().expand(-1, 2, -1)
        no = torch.zeros(128, 2, dtype=torch.bool)
        optimizer.zero_grad()
        prior.loss(SequenceBatch({"vector": seen}, action, torch.zeros(128, 2), no, no, no))[0].backward()
        optimizer.step()
        prior.after_update()
    probe = np.array([[1.0, -1.0], [-1.0, 1.0]], np.float32).repeat(50, 0)
    action, _ = prior.act({"vector": probe}, {})
    assert (np.sign(action) == np.sign(probe)).mean() > 0.95


def test_one_hots_lie_at_plus_and_minus_one() -> None:
    """A discrete action is drawn as the class whose entry came out highest."""
    learned = DiffusionPrior(**settings(action=ActionSpec("discrete", (1,), (3,))))
    centred = learned._centred(learned.codec.encode(torch.tensor([[[2], [0]]])))
    assert centred.tolist() == [[[-1.0, -1.0, 1.0], [1.0, -1.0, -1.0]]]
    given = learned.given({"vector": STATE}, candidates=1, steps=2)
    assert given.actions(torch.tensor([[[[0.2, 0.9, -1.0]]]])).tolist() == [[[[0.0, 1.0, 0.0]]]]


def test_bad_combinations_are_refused() -> None:
    """Annealing has no learned prior, both draw as many actions, and batches are long enough."""
    prior = DiffusionPrior(**settings())
    with pytest.raises(ConfigError, match="without a learned prior"):
        make(prior, "annealed")
    with pytest.raises(ConfigError, match="horizon=3, but the prior draws sequences of 4"):
        make(prior, horizon=3)
    with pytest.raises(DataError, match="sequences of 4 actions"):
        prior.loss(batch(time=3))


def test_a_planner_does_not_save_its_prior_twice() -> None:
    """The prior has a role of its own, which saves and counts it."""
    assert not list(make(DiffusionPrior(**settings())).parameters())


def test_levels_are_left_out_from_the_noisiest_on() -> None:
    given = DiffusionPrior(**settings(levels=50)).given({"vector": STATE}, candidates=2, steps=5)
    assert given.levels == [49, 39, 29, 19, 9, -1]
    assert given.alpha_bar(5) == 1.0
    assert given.condition.shape[0] == 4
    assert sqrt(given.alpha_bar(4)) > 0.9

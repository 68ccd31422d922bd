"""Dynamics models on a system with a known answer: x' = x + 0.1·push, and noise."""

from __future__ import annotations

import math

import pytest
import torch
from tests.packaged import adjusted

from rl_lab.components.dynamics.models import CategoricalDynamics, DeterministicDynamics, GaussianDynamics
from rl_lab.components.dynamics.outcomes import KnownOutcome, LearnedOutcome
from rl_lab.errors import ConfigError
from rl_lab.nn.normalizers import RunningMeanStd
from rl_lab.simulation.analytic import make_task
from rl_lab.simulation.learned import LearnedSimulator
from rl_lab.simulation.simulator import Simulator
from rl_lab.specs import ActionSpec, ObservationSpec

OBSERVATION = {"vector": ObservationSpec("vector", (2,), "float32")}
ACTION = ActionSpec("continuous", (2,))
KNOWN = {
    "environment": "Pendulum-v1", "kwargs": {}, "normalize_actions": True, "action_repeat": "auto", "shaping": 0.0,
}  # fmt: skip
MODELS = {"deterministic": DeterministicDynamics, "gaussian": GaussianDynamics, "categorical": CategoricalDynamics}


def make(name: str, **settings):
    torch.manual_seed(0)
    given = adjusted(f"components/dynamics/{name}", observation=OBSERVATION, action=ACTION, units=32, layers=1)
    return MODELS[name](**given | settings)


def transitions(rows: int = 256, noise: float = 0.0):
    observation, action = 3.0 * torch.randn(rows, 2) + 5.0, torch.rand(rows, 2) * 2 - 1
    return observation, action, observation + 0.1 * action + noise * torch.randn(rows, 2)


def train(model, updates: int, noise: float = 0.0) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(updates):
        observation, action, following = transitions(noise=noise)
        valid = torch.ones(len(observation), dtype=torch.bool)
        model.update_statistics(observation, action, following, valid)
        loss, _ = model.loss(observation, action, following, valid, torch.arange(len(observation)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_the_change(name, members):
    """Observations are far larger than the change that an action makes: one network, or several, still learn it."""
    model = make(name, members=members)
    train(model, 100)
    observation, action, following = transitions()
    error = (model.expect(observation, action) - following).abs().mean()
    assert error < 0.2 * (following - observation).abs().mean()


def test_a_gaussian_learns_the_noise():
    """Drawn observations spread as those that were seen."""
    model = make("gaussian")
    train(model, 150, noise=0.05)
    observation, action = torch.full((1, 2_000, 2), 5.0), torch.zeros(1, 2_000, 2)
    drawn = model.predict(observation, action, sample=True)
    assert drawn.std().item() == pytest.approx(0.05, rel=0.25)


def test_log_variances_stay_within_their_bounds():
    """Whatever the network says, also far from the data."""
    model = make("gaussian", min_log_variance=-4.0, max_log_variance=0.5)
    raw = torch.tensor([[[0.0, 0.0, 1e4, -1e4]]])
    _, log_variance = model.moments(raw)
    torch.testing.assert_close(log_variance, torch.tensor([[[0.5, -4.0]]]), atol=0.02, rtol=0.0)


def test_a_categorical_can_have_two_modes():
    """A change that is either far down or far up: draws are at the ends, the mean between."""
    model = make("categorical", bins=11, limit=5.0)
    raw = torch.full((1, 500, 22), -20.0)
    raw[..., [0, 10, 11, 21]] = 0.0
    drawn, mean = model.change(raw, sample=True), model.change(raw, sample=False)
    assert set(drawn.unique().tolist()) == {-5.0, 5.0}
    assert mean.abs().max() < 1e-3


def test_episode_ends_are_not_transitions():
    """A row without a successor changes neither the scales nor the loss."""
    model = make("gaussian")
    observation, action, following = transitions()
    valid = torch.ones(256, dtype=torch.bool)
    valid[100:] = False
    broken = torch.where(valid[:, None], following, 1e6)
    model.update_statistics(observation, action, broken, valid)
    own = RunningMeanStd((2,), eps=1e-6)
    own.update((following - observation)[:100])
    torch.testing.assert_close(model.changes.mean, own.mean)
    torch.testing.assert_close(model.changes.variance, own.variance, rtol=1e-4, atol=1e-7)
    loss, _ = model.loss(observation, action, broken, valid)
    clean, _ = model.loss(observation[:100], action[:100], following[:100], valid[:100])
    torch.testing.assert_close(loss, clean)


def test_members_have_bootstraps_of_their_own():
    """How often a record counts for a member is Poisson(1), independent between members, and the same in every batch
    and after a restart: it depends on the record's number alone."""
    model, record = make("gaussian", members=4), torch.arange(20_000)
    counts = model.bootstrap_counts(record)
    shares = [float((counts == k).float().mean()) for k in range(4)]
    assert shares == pytest.approx([math.exp(-1) / math.factorial(k) for k in range(4)], abs=0.01)
    assert torch.corrcoef(counts).fill_diagonal_(0.0).abs().max() < 0.03
    torch.testing.assert_close(
        make("gaussian", members=4).bootstrap_counts(record.flip(0)[:50]), counts.flip(1)[:, :50]
    )


def test_a_member_learns_from_its_own_bootstrap():
    """A transition moves those members alone whose bootstrap holds it."""
    model = make("deterministic", members=3)
    observation, action, following = transitions(1)
    valid = torch.ones(1, dtype=torch.bool)
    model.update_statistics(*transitions(), torch.ones(256, dtype=torch.bool))
    seen = set()
    for number in range(40):
        record = torch.tensor([number])
        loss, _ = model.loss(observation, action, following, valid, record)
        (gradient,) = torch.autograd.grad(loss, model.network.layers[-1].bias)
        moved = gradient.abs().sum((1, 2)) > 0
        assert moved.tolist() == (model.bootstrap_counts(record)[:, 0] > 0).tolist()
        seen.add(tuple(moved.tolist()))
    assert len(seen) > 4


def test_elites_are_the_best_on_held_out_transitions():
    """A member that was spoilt is not planned with."""
    model = make("gaussian", members=3, elites=2)
    train(model, 60)
    with torch.no_grad():
        model.network.layers[-1].bias[1] += 3.0
    for _ in range(40):
        observation, action, following = transitions()
        model.loss(observation, action, following, torch.ones(256, dtype=torch.bool), torch.arange(256))
    assert sorted(model.elite_members.tolist()) == [0, 2]
    assert model.expect(*transitions()[:2]).shape == (256, 2)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gaussian", {"members": 0}, "members=0"),
        ("gaussian", {"members": 2, "elites": 3}, "elites=3"),
        ("gaussian", {"min_log_variance": 1.0}, "min_log_variance=1.0"),
        ("categorical", {"bins": 1}, "bins=1"),
        ("deterministic", {"validation_share": 1.0}, "validation_share=1.0"),
    ],
)
def test_wrong_settings_are_refused(name, settings, words):
    """The message names the setting."""
    with pytest.raises(ConfigError, match=words):
        make(name, **settings)


def test_images_are_refused():
    """A model of observations needs vectors."""
    image = {"image": ObservationSpec("image", (64, 64, 3), "uint8")}
    with pytest.raises(ConfigError, match="is an image"):
        make("gaussian", observation=image)


# Planning in them -----------------------------------------------------------------------------------------------------


def simulator(**settings) -> LearnedSimulator:
    outcome = LearnedOutcome(observation=OBSERVATION, action=ACTION, units=8, layers=1)
    return LearnedSimulator(dynamics=make("gaussian", members=2), outcome=outcome, **settings)


def shift_members(model) -> None:
    """Member 0 always says -1, member 1 always +1, both surely."""
    for parameter in model.network.parameters():
        parameter.data.zero_()
    model.network.layers[-1].bias.data[0, :, :2], model.network.layers[-1].bias.data[1, :, :2] = -1.0, 1.0
    model.network.layers[-1].bias.data[:, :, 2:] = -50.0
    model.max_log_variance.data.fill_(-40.0)
    model.min_log_variance.data.fill_(-50.0)


def test_particles_stay_with_their_member():
    """TS∞: after three steps half the particles are at -3, half at +3. TS1: they have mixed. One particle: the mean."""
    torch.manual_seed(0)
    ends = {}
    for propagation in ("tsinf", "ts1"):
        model = simulator(propagation=propagation)
        shift_members(model.dynamics)
        state = model.spread(torch.zeros(1, 2), 3, 8)
        for _ in range(3):
            state, reward, continuation = model.step(state, torch.zeros(24, 2))
        assert reward.shape == continuation.shape == (24,)
        ends[propagation] = sorted(state[0, :, 0].round().tolist())
    assert ends["tsinf"] == [-3.0] * 4 + [3.0] * 4
    assert sum(ends["ts1"]) == 0.0
    assert ends["ts1"] != ends["tsinf"]
    single = model.step(model.spread(torch.zeros(1, 2), 3), torch.zeros(3, 2)).state
    torch.testing.assert_close(single, torch.zeros(3, 2))


@pytest.mark.parametrize("particles", [1, 4])
def test_evaluation_is_that_of_single_steps(particles):
    """Rewards of all steps at once: the same return, of expected steps and of drawn ones."""
    model, actions = simulator(), torch.rand(3 * particles, 5, 2)
    results = []
    for evaluate in (model.evaluate, lambda *arguments: Simulator.evaluate(model, *arguments)):
        torch.manual_seed(0)
        results.append(evaluate(model.spread(torch.ones(1, 2), 3, particles), actions, 0.9))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_particles_must_fit_the_members():
    """Each member gets as many: said before planning."""
    with pytest.raises(ConfigError, match="particles=3, but 2 members"):
        simulator().spread(torch.zeros(1, 2), 4, 3)


def test_known_rewards_are_the_tasks():
    """Computed from observations, they are what the equations pay; another observation is refused."""
    task = make_task(environment="Pendulum-v1")
    outcome = KnownOutcome(**KNOWN)
    state, action = torch.tensor([[0.3, 1.0], [3.0, -2.0]]), torch.tensor([[0.5], [-1.0]])
    following = task.step(state, action)
    seen = outcome(task.encode(state), action, task.encode(following))
    torch.testing.assert_close(seen.reward, task.reward(state, action, following))
    assert seen.continuation.tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match="observations of 3 numbers, the agent sees 2"):
        outcome(state, action, following)
    with pytest.raises(ConfigError, match="action_repeat=2"):
        KnownOutcome(**KNOWN | {"action_repeat": 2})


def test_rewards_and_ends_are_learned():
    """The reward by where the transition leads, the end by a wall at 6."""
    torch.manual_seed(0)
    outcome = LearnedOutcome(observation=OBSERVATION, action=ACTION, units=32, layers=1)
    optimizer = torch.optim.Adam(outcome.parameters(), 1e-2)

    def label(following):
        return 50.0 + following.sum(-1), following[:, 0] > 6.0

    for _ in range(200):
        observation, action, following = transitions()
        valid = torch.ones(256, dtype=torch.bool)
        loss = sum(outcome.losses(observation, action, following, *label(following), valid).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    observation, action, following = transitions()
    reward, ends = label(following)
    seen = outcome(observation, action, following)
    assert (seen.reward - reward).abs().mean() < 0.5
    assert ((seen.continuation < 0.5) == ends).float().mean() > 0.95
    assert math.isfinite(seen.reward.sum().item())

"""M: its mixtures, its memory and the dream that it offers."""

from __future__ import annotations

import math

import pytest
import torch
from tests.components.planner_models import make_planner

from rl_lab.components.actors.flat import FlatController
from rl_lab.components.dynamics.mdn_rnn import MDNRNN, MemoryState
from rl_lab.components.planners.base import Planner
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.gradient import GradientPlanner
from rl_lab.components.representations import Identity
from rl_lab.nn.mixtures import GaussianMixtures
from rl_lab.simulation.mdn_rnn import MDNSimulator
from rl_lab.specs import ActionSpec, ObservationSpec

CAR = ActionSpec("continuous", (3,))


def test_published_sizes() -> None:
    """422,368 parameters and PyTorch's second bias; a linear controller of CarRacing has 867."""
    model = MDNRNN(latent_size=32, action_size=3)
    assert sum(p.numel() for p in model.parameters()) == 422_368 + 1_024
    assert FlatController(inputs=model.feature_size, action=CAR).size == 867
    assert FlatController(inputs=32, action=CAR, units=40).size == 1_443  # V alone and a hidden layer
    doom = MDNRNN(latent_size=64, action_size=1, units=512, sees=["latent", "hidden", "cell"])
    assert FlatController(inputs=doom.feature_size, action=ActionSpec("continuous", (1,)), bias=False).size == 1_088


def test_the_likelihood_against_a_slow_sum() -> None:
    """-log Σ π N, one mixture for each dimension."""
    logits, mean, log_std = torch.randn(3, 2, 4, 3, dtype=torch.float64)
    value = torch.randn(2, 4, dtype=torch.float64)
    result = GaussianMixtures(logits, mean, log_std).log_prob(value)
    for row in range(2):
        for dim in range(4):
            weights = [math.exp(x) for x in logits[row, dim].tolist()]
            density = 0.0
            for k in range(3):
                std = math.exp(log_std[row, dim, k])
                z = (value[row, dim].item() - mean[row, dim, k].item()) / std
                density += weights[k] / sum(weights) * math.exp(-0.5 * z * z) / (std * math.sqrt(2 * math.pi))
            assert math.isclose(result[row, dim].item(), math.log(density), rel_tol=1e-9)


def test_temperature_divides_logits_and_multiplies_variances() -> None:
    """At 0 the mean of the likeliest component; elsewhere shares and spread as the formula says."""
    logits, mean = torch.tensor([[math.log(0.8), math.log(0.2)]]), torch.tensor([[-5.0, 5.0]])
    mixtures = GaussianMixtures(logits, mean, torch.log(torch.tensor([[0.5, 0.5]])))
    assert mixtures.sample(0.0).tolist() == [-5.0]
    many = GaussianMixtures(*(part.expand(40_000, 1, 2) for part in mixtures))
    torch.manual_seed(0)
    for tau in (0.5, 2.0):
        draw = many.sample(tau)
        low = draw < 0
        expected = 0.8 ** (1 / tau) / (0.8 ** (1 / tau) + 0.2 ** (1 / tau))
        assert low.float().mean().item() == pytest.approx(expected, abs=0.01)
        assert draw[low].std().item() == pytest.approx(0.5 * math.sqrt(tau), rel=0.03)


def test_a_sequence_is_the_same_as_its_steps_and_begins_anew_with_an_episode() -> None:
    """The memory is cleared where an episode begins, in that sequence alone."""
    model = MDNRNN(latent_size=3, action_size=2, units=8)
    latent, action = torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[1, 4] = True
    hidden = model(latent, action, first)
    state = model.initial(2)
    for time in range(6):
        keep = (~first[:, time, None]).float()
        state = model.step(latent[:, time], action[:, time], MemoryState(state.hidden * keep, state.cell * keep))
        torch.testing.assert_close(hidden[:, time], state.hidden)
    alone = model(latent[1:, 4:], action[1:, 4:], first[1:, 4:])
    torch.testing.assert_close(hidden[1:, 4:], alone)


def test_the_simulator_dreams_and_follows_what_is_seen() -> None:
    """`observe` takes in the latent before; a dream without a reward head pays 1 for each step."""
    observation = {"vector": ObservationSpec("vector", (3,), "float32")}
    model = MDNRNN(latent_size=3, action_size=2, units=8, terminal=True)
    simulator = MDNSimulator(representation=Identity(observation=observation), dynamics=model, temperature=0.0)
    seen, action = torch.randn(4, 3), torch.randn(4, 2)
    state = simulator.observe({"vector": seen})
    assert not state.hidden.any()
    step = simulator.step(state, action)
    assert step.reward.tolist() == [1.0] * 4
    assert ((step.continuation > 0) & (step.continuation < 1)).all()
    following = simulator.observe(
        {"vector": seen + 1}, previous=state, action=action, is_first=torch.tensor([True, False, False, False])
    )
    assert not following.hidden[0].any()
    torch.testing.assert_close(following.hidden[1:], step.state.hidden[1:])
    torch.testing.assert_close(simulator.observation(following)["vector"], seen + 1)


def test_a_population_acts_in_one_call() -> None:
    """Row i of the vectors chooses for row i; entries stay within their limits."""
    controller = FlatController(inputs=4, action=CAR, units=3, low=[-1.0, 0.0, -1.0])
    vectors, features = torch.randn(5, controller.size), torch.randn(5, 4)
    together = controller(features, vectors)
    assert (together[:, 1] >= 0).all()
    for row in range(5):
        controller.vector.data.copy_(vectors[row])
        torch.testing.assert_close(controller(features[row : row + 1]), together[row : row + 1])
    discrete = FlatController(inputs=4, action=ActionSpec("discrete", (2,), (3, 2)))
    assert discrete(features, torch.randn(5, discrete.size)).sum(-1).tolist() == [2.0] * 5


@pytest.mark.parametrize(
    "planner",
    [
        make_planner(CEM, action=CAR, horizon=3, samples=16, elites=4, iterations=2),
        make_planner(GradientPlanner, action=CAR),
    ],
)
def test_planners_plan_in_it(planner: Planner) -> None:
    """M is a simulator like any other: a plan is finite, within bounds, and better in the model than the opposite."""
    observation = {"vector": ObservationSpec("vector", (3,), "float32")}
    model = MDNRNN(latent_size=3, action_size=3, units=8, reward=True, terminal=True)
    simulator = MDNSimulator(representation=Identity(observation=observation), dynamics=model, temperature=0.0)
    planner.attach(simulator)
    torch.manual_seed(0)
    state = simulator.observe({"vector": torch.randn(2, 3)})
    plan = planner.plan(state, planner.initial_memory(2))
    plan.require_finite()
    assert (plan.action.abs() <= 1.0).all()
    horizon = planner.horizon
    chosen, opposite = (
        simulator.evaluate(state, sign * plan.action[:, None].expand(2, horizon, 3)) for sign in (1, -1)
    )
    assert chosen.total.sum() > opposite.total.sum()

"""The simulator interface, on a model with a known answer: x' = x + a, reward -x'², and value -x²."""

from __future__ import annotations

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.simulation.service import SimulatorService
from rl_lab.simulation.simulator import SimulatedStep, Simulator, map_state


class Line(Simulator):
    has_value = has_policy = True

    def observe(self, observation, *, previous=None, action=None, is_first=None):
        return {"x": observation["vector"]}

    def step(self, state, action):
        x = state["x"] + action
        return SimulatedStep({"x": x}, -x.square().sum(-1), (x.abs() < 5).float().squeeze(-1))

    def value(self, state):
        return -state["x"].square().sum(-1)

    def policy(self, state):
        return -state["x"] / 2


class Bare(Line):
    has_value = has_policy = False
    value, policy = Simulator.value, Simulator.policy


def start() -> dict[str, torch.Tensor]:
    return Line().observe({"vector": torch.tensor([[4.0], [-2.0]])})


def test_a_rollout_follows_given_actions():
    """reward[:, t] follows action[:, t]; states hold the start and one after each action."""
    actions = torch.tensor([[[-1.0], [-1.0], [2.0]], [[1.0], [1.0], [0.0]]])
    rollout = Line().rollout(start(), actions)
    assert [state["x"][:, 0].tolist() for state in rollout.states] == [[4, -2], [3, -1], [2, 0], [4, 0]]
    assert rollout.reward.tolist() == [[-9, -4, -16], [-1, 0, 0]]
    assert rollout.continuation.shape == (2, 3)
    torch.testing.assert_close(rollout.action, actions)
    assert Line().rollout(start(), actions, horizon=2).reward.shape == (2, 2)


def test_a_rollout_follows_a_policy():
    """The model's own, or one that is given."""
    own = Line().rollout(start(), None, 3)
    assert own.states[-1]["x"][:, 0].tolist() == [0.5, -0.25]
    still = Line().rollout(start(), lambda state: torch.zeros_like(state["x"]), 2)
    assert still.reward.tolist() == [[-16, -16], [-4, -4]]


def test_rollouts_are_differentiable():
    """Gradient planners need it."""
    actions = torch.zeros(2, 3, 1, requires_grad=True)
    Line().rollout(start(), actions).reward.sum().backward()
    assert actions.grad is not None
    assert actions.grad[0, 0].item() == -24.0  # every later x moves too: 3 × -2 × 4


def test_what_a_rollout_cannot_do_is_said():
    """A policy needs a horizon, and actions cannot be longer than they are."""
    with pytest.raises(ValueError, match="needs a horizon"):
        Line().rollout(start(), None)
    with pytest.raises(ValueError, match="longer than the 1 actions"):
        Line().rollout(start(), torch.zeros(2, 1, 1), 3)
    with pytest.raises(NotImplementedError, match="Bare has no policy"):
        Bare().rollout(start(), None, 2)
    with pytest.raises(NotImplementedError, match="predicts no value"):
        Bare().value(start())


def test_the_service_has_the_model_attached_last():
    """A planner that keeps the service plans in the present model."""
    service = SimulatorService()
    with pytest.raises(ConfigError, match="No simulator is attached"):
        _ = service.simulator
    service.attach(Bare())
    service.attach(line := Line())
    assert service.simulator is line


def test_states_are_repeated_for_candidates():
    """Environment-major, through dicts, tuples and named tuples."""
    assert Line().spread(start(), 2)["x"][:, 0].tolist() == [4, 4, -2, -2]
    nested = map_state(lambda value: value + 1, (torch.zeros(1), [torch.ones(1)]))
    assert [nested[0].item(), nested[1][0].item()] == [1.0, 2.0]
    step = map_state(lambda value: value * 2, SimulatedStep(torch.ones(1), torch.ones(1), torch.ones(1)))
    assert isinstance(step, SimulatedStep)

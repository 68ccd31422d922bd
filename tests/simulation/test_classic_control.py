"""Known dynamics against Gymnasium, step by step."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from rl_lab.components.actions import ActionCodec
from rl_lab.errors import ConfigError
from rl_lab.simulation.analytic import AnalyticSimulator, make_analytic_simulator, make_task
from rl_lab.simulation.classic_control import TASKS
from rl_lab.simulation.simulator import Simulator
from rl_lab.specs import ActionSpec

TRANSITIONS = 1_000
# Wide enough to reach every wall, wrap-around and end of an episode.
RANGES = {
    "CartPole-v1": (2.5, 3.0, 0.22, 3.0),
    "Pendulum-v1": (9.0, 8.0),
    "MountainCar-v0": (0.9, 0.07),
    "MountainCarContinuous-v0": (0.9, 0.07),
    "Acrobot-v1": (3.1, 3.1, 10.0, 20.0),
}
OFFSET = {"MountainCar-v0": -0.3, "MountainCarContinuous-v0": -0.3}
SETTINGS = {"action_repeat": "auto", "normalize_actions": True, "shaping": 0.0, "precision": "float32"}


def real_transitions(name: str) -> dict[str, np.ndarray]:
    """From random states with random actions, as Gymnasium computes them."""
    rng = np.random.default_rng(0)
    env = gymnasium.make(name, disable_env_checker=True).unwrapped
    env.reset(seed=0)
    rows: dict[str, list] = {"state": [], "action": [], "observation": [], "reward": [], "terminated": []}
    for _ in range(TRANSITIONS):
        state = rng.uniform(-1, 1, len(RANGES[name])) * RANGES[name]
        state[0] += OFFSET.get(name, 0.0)
        discrete = TASKS[name].action.kind == "discrete"
        action = rng.integers(TASKS[name].action.classes[0]) if discrete else rng.uniform(-1, 1, 1)
        env.state = state.copy()
        if name == "CartPole-v1":
            env.steps_beyond_terminated = None
        scale = 2.0 if name == "Pendulum-v1" else 1.0
        seen, reward, terminated, _, _ = env.step(action if discrete else action * scale)
        for key, value in zip(rows, (state, np.atleast_1d(action), seen, reward, terminated), strict=True):
            rows[key].append(value)
    return {key: np.stack(values) for key, values in rows.items()}


@pytest.mark.parametrize("name", TASKS)
def test_a_path_is_made_of_steps(name):
    """Whole paths, which a task may compute in a faster way, pass the states that single steps pass."""
    generator, task = torch.Generator().manual_seed(0), make_task(environment=name)
    shape = (50, 12, task.action.encoded_size)
    state = (2 * torch.rand(50, len(RANGES[name]), generator=generator) - 1) * torch.tensor(RANGES[name])
    actions = 2 * torch.rand(shape, generator=generator) - 1
    path = task.path(state, actions)
    assert path.shape == (50, 13, state.shape[1])
    for time in range(12):
        torch.testing.assert_close(path[:, time + 1], task.step(path[:, time], actions[:, time]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_known_dynamics_are_gymnasiums(name):
    """Observation, reward and end of 1,000 random transitions, walls and wrap-arounds among them."""
    real = real_transitions(name)
    task = make_task(environment=name)
    state = torch.from_numpy(real["state"])
    action = torch.from_numpy(real["action"])
    if task.action.kind == "discrete":
        action = ActionCodec(task.action).encode(action).double()
    step = AnalyticSimulator(task, precision="float64").step(state, action)
    np.testing.assert_allclose(task.encode(step.state).numpy(), real["observation"], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(step.reward.numpy(), real["reward"], rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(step.continuation.numpy() == 0.0, real["terminated"])
    if name != "Pendulum-v1":
        assert 0 < real["terminated"].sum() < TRANSITIONS


@pytest.mark.parametrize("name", TASKS)
def test_a_state_is_read_off_its_observation(name):
    """Decoding an observation to a state and observing that state gives the observation back."""
    task = make_task(environment=name)
    state = torch.from_numpy(real_transitions(name)["state"][:50])
    seen = task.encode(state)
    torch.testing.assert_close(task.encode(task.decode(seen)), seen)
    spec = {"vector": {"shape": [task.observation_size]}}
    own = {"environment": name, "observation": spec, "action": {"kind": task.action.kind}, "kwargs": {}}
    simulator = make_analytic_simulator(**own, **SETTINGS)
    assert simulator.observe({"vector": seen.float()}).shape == state.shape


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_evaluation_is_that_of_single_steps(name, repeat):
    """All steps at once: the same return and weight, through episode ends."""
    torch.manual_seed(0)
    task = make_task(environment=name)
    simulator = AnalyticSimulator(task, action_repeat=repeat, shaping=0.3, precision="float64")
    state = torch.from_numpy(real_transitions(name)["state"][:40])
    codec = ActionCodec(task.action)
    classes = torch.randint(0, 2, (40, 6, 1)) if task.action.kind == "discrete" else torch.rand(40, 6, 1)
    actions = codec.encode(classes).double()
    fast, slow = simulator.evaluate(state, actions, 0.9), Simulator.evaluate(simulator, state, actions, 0.9)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_of_ones_own_is_planned_with():
    """Of a subclass, and of one instance: no evaluation of all steps at once stands in for it."""

    class Costly(AnalyticSimulator):
        def step(self, state, action):
            step = super().step(state, action)
            return step._replace(reward=step.reward - 2.0)

    task, state, actions = make_task(environment="Pendulum-v1"), torch.rand(4, 2), torch.rand(4, 5, 1)
    plain, costly = (
        kind(task, action_repeat=1, shaping=0.0, precision="float32") for kind in (AnalyticSimulator, Costly)
    )
    total = plain.evaluate(state, actions).total
    torch.testing.assert_close(costly.evaluate(state, actions).total, total - 10.0)
    plain.step = costly.step
    torch.testing.assert_close(plain.evaluate(state, actions).total, total - 10.0)


def test_action_repeat_adds_rewards_until_the_end():
    """A repeated action pays for every frame up to the one that ends the episode, and the state stays there."""
    task = make_task(environment="CartPole-v1")
    state = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.39, 3.0, 0.0, 0.0]], dtype=torch.float64)
    right = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(2, 2)
    step = AnalyticSimulator(task, action_repeat=4, precision="float64").step(state, right)
    assert step.reward.tolist() == [4.0, 1.0]
    assert step.continuation.tolist() == [1.0, 0.0]
    torch.testing.assert_close(step.state[1], task.step(state, right)[1])


def test_shaping_prefers_the_middle():
    """The cost grows with the distance from where the task wants to be, and is nothing unless asked for."""
    task = make_task(environment="CartPole-v1")
    states, left = torch.tensor([[0.0, 0, 0, 0], [2.0, 0, 0.1, 0]]), torch.tensor([[1.0, 0.0]] * 2)
    assert AnalyticSimulator(task).step(states, left).reward.tolist() == [1.0, 1.0]
    shaped = AnalyticSimulator(task, shaping=0.2).step(states, left).reward
    assert shaped[0] > shaped[1] > 0.8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": "CartPole-v2"}, "no known dynamics for 'CartPole-v2'. Did you mean 'CartPole-v1'"),
        ({"observation": {"image": {"shape": [64, 64, 3]}}}, "agent sees image"),
        ({"observation": {"vector": {"shape": [8]}}}, r"vector \[4\], but the agent sees vector \[8\]"),
        ({"action": {"kind": "continuous"}}, "need discrete actions"),
        ({"kwargs": {"length": 2.0}}, "length"),
    ],
)
def test_what_the_equations_do_not_cover_is_refused(changes, words):
    """Another environment, observation, action or argument: one message that says which."""
    fitting = {
        "environment": "CartPole-v1",
        "observation": {"vector": {"shape": [4]}},
        "action": {"kind": "discrete"},
        "kwargs": {"render_mode": "rgb_array", "sutton_barto_reward": True},
    }
    make_analytic_simulator(**fitting, **SETTINGS)
    with pytest.raises(ConfigError, match=words):
        make_analytic_simulator(**fitting | changes, **SETTINGS)


def test_arguments_of_the_environment_change_the_dynamics():
    """Pendulum's gravity, and a torque that is not normalised."""
    action, state = torch.ones(1, 1), torch.tensor([[1.0, 0.0]])
    plain = make_task(environment="Pendulum-v1").step(state, action)
    assert make_task(environment="Pendulum-v1", kwargs={"g": 5.0}).step(state, action)[0, 1] < plain[0, 1]
    assert make_task(environment="Pendulum-v1", normalize_actions=False).step(state, action)[0, 1] < plain[0, 1]
    assert isinstance(TASKS["Pendulum-v1"].action, ActionSpec)

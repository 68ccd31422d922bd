"""What a step returns: ends of episodes, rewards, repeats, limits."""

from __future__ import annotations

from typing import Any

import example_environments  # noqa: F401  (registers them)
import numpy as np
import pytest
from environment_helpers import assert_same_step, play, random_actions

from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.environments.base import episode_seed
from rl_lab.environments.control_suite import ControlSuite
from rl_lab.environments.inspection import inspect_environment
from rl_lab.environments.vector import EpisodicVectorEnv
from rl_lab.environments.wrappers import PixelObservation
from rl_lab.errors import EnvironmentFailure

BACKENDS = ["sync", "process"]


def make(name: str, backend: Any = "sync", num_envs: int = 2, **options: Any) -> EpisodicVectorEnv:
    return make_vector_env(EnvironmentSettings(id=name, num_envs=num_envs, backend=backend, **options), seed=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ended_episode_is_reset_in_the_same_step(backend: Any) -> None:
    """No fake transition: the step that ends an episode shows the next one's start, the true last record beside it."""
    env = make("ExampleCounter-v0", backend, kwargs={"length": 3})
    first = env.reset()
    assert first.is_first.all()
    assert first.ended is None
    steps = play(env, random_actions(env, 3))
    assert [step.ended is not None for step in steps] == [False, False, True]
    last = steps[-1]
    np.testing.assert_array_equal(last.is_first, [True, True])
    np.testing.assert_array_equal(last.observation["vector"][:, 0], 0)
    np.testing.assert_array_equal(last.reward, 0)
    np.testing.assert_array_equal(last.ended.indices, [0, 1])
    np.testing.assert_array_equal(last.ended.observation["vector"][:, 0], 3)
    np.testing.assert_array_equal(last.ended.reward, 3)
    assert last.ended.is_terminal.all()
    assert last.ended.info == [{"success": True}] * 2
    np.testing.assert_array_equal(steps[0].reward, 1)
    assert steps[0].reward.dtype == np.float32
    assert steps[0].observation["vector"].dtype == np.float32
    env.close()


def test_every_step_returns_arrays_of_its_own() -> None:
    """The receiver may keep what it was given."""
    env = make("ExampleCounter-v0")
    env.reset()
    kept = play(env, random_actions(env, 4))
    assert [float(step.observation["vector"][0, 0]) for step in kept] == [1, 2, 3, 4]


def test_a_registered_time_limit_truncates() -> None:
    """A time limit is never a termination, and a termination within it stays one."""
    env = make("ExampleTimed-v0")
    env.reset()
    step = play(env, random_actions(env, 4))[-1]
    assert not step.ended.is_terminal.any()
    np.testing.assert_array_equal(step.ended.observation["vector"][:, 0], 4)
    longer = make("ExampleTimed-v0", time_limit=50)
    longer.reset()
    ends = [step.ended for step in play(longer, random_actions(longer, 6))]
    assert ends[3] is None
    assert ends[5].is_terminal.all()
    unlimited = make("ExampleTimed-v0", time_limit=None)
    unlimited.reset()
    assert play(unlimited, random_actions(unlimited, 6))[-1].ended.is_terminal.all()


def test_action_repeat_sums_rewards_and_stops_at_the_end() -> None:
    """One decision lasts several frames; the last may be shorter. Time limits count frames."""
    env = make("ExampleCounter-v0", action_repeat=3)
    env.reset()
    first, second = play(env, random_actions(env, 2))
    np.testing.assert_array_equal(first.reward, 1 + 2 + 3)
    np.testing.assert_array_equal(second.ended.reward, 4 + 5)
    np.testing.assert_array_equal(second.ended.observation["vector"][:, 0], 5)
    assert env.action_repeat == 3
    limited = make("ExampleCounter-v0", action_repeat=3, time_limit=4)
    limited.reset()
    ended = play(limited, random_actions(limited, 2))[-1].ended
    np.testing.assert_array_equal(ended.reward, 4)
    assert not ended.is_terminal.any()
    facts = inspect_environment(EnvironmentSettings(id="ExampleCounter-v0", action_repeat=3, time_limit=4))
    assert facts.max_episode_steps == 2


@pytest.mark.parametrize(
    ("name", "length", "limit", "owner", "method"),
    [
        ("dm_control/cartpole-swingup-v0", 7, 7, ControlSuite, "_picture"),
        ("Pendulum-v1", 7, 7, PixelObservation, "_frame"),
        ("ExampleCounter-v0", 5, 50, PixelObservation, "_frame"),  # it terminates
    ],
)
def test_only_the_last_frame_of_a_repeated_action_is_drawn(
    name: str, length: int, limit: int, owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing takes longer than physics: a decision draws one picture, also where a limit or an end cuts it short. That
    picture, and the rewards, are those of the same frames one by one."""
    options = {"num_envs": 1, "observation": "pixels", "time_limit": limit, "image_size": 64}
    env, single = make(name, action_repeat=3, **options), make(name, **options)
    env.reset()
    single.reset()
    actions = random_actions(env, -(-length // 3))
    frames = play(single, [action for action in actions for _ in range(3)][:length])
    drawn, draw = [], getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda self, *size: drawn.append(1) or draw(self, *size))
    steps = play(env, actions)
    assert len(drawn) == len(steps) + 1  # and the start of the next episode
    for index, step in enumerate(steps):
        parts = frames[3 * index : 3 * index + 3]
        seen, alone = (step, parts[-1]) if step.ended is None else (step.ended, parts[-1].ended)
        np.testing.assert_array_equal(seen.observation["image"], alone.observation["image"])
        total = sum(float(part.reward[0]) for part in parts[:-1]) + float(alone.reward[0])
        np.testing.assert_allclose(seen.reward, total, rtol=1e-5)
    assert steps[-1].ended.is_terminal.all() == frames[-1].ended.is_terminal.all() == (length < limit)


def test_every_episode_has_the_seed_of_its_number() -> None:
    """Environment i plays episode k with the seed of (run seed, i, k)."""
    env = make("ExampleCounter-v0", kwargs={"length": 1})
    starts = [env.reset().observation["vector"][:, 1]]
    starts += [step.observation["vector"][:, 1] for step in play(env, random_actions(env, 3))]
    for episode, row in enumerate(starts):
        for index in range(2):
            rng = np.random.default_rng(episode_seed(0, index, episode))
            assert row[index] == np.float32(rng.uniform())


def test_resetting_starts_from_episode_zero_again() -> None:
    env = make("CartPole-v1")
    first = env.reset().observation["vector"].copy()
    play(env, random_actions(env, 50))
    np.testing.assert_array_equal(env.reset().observation["vector"], first)


@pytest.mark.parametrize("how", ["nan", "shape"])
def test_a_broken_observation_stops_the_run(how: str) -> None:
    """NaN or a wrong shape would poison the replay; the message says which environment and what to do."""
    env = make("ExampleFragile-v0", kwargs={"how": how})
    env.reset()
    with pytest.raises(EnvironmentFailure, match="NaN" if how == "nan" else "does not fit its observation_space"):
        play(env, random_actions(env, 5))


def test_actions_of_a_wrong_shape_are_refused() -> None:
    env = make("CartPole-v1")
    with pytest.raises(EnvironmentFailure, match="before reset"):
        env.step(np.zeros((2, 1), np.int32))
    env.reset()
    with pytest.raises(EnvironmentFailure, match=r"expected \(2, 1\)"):
        env.step(np.zeros(2, np.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_environment_zero_can_be_rendered(backend: Any) -> None:
    env = make_vector_env(EnvironmentSettings(id="ExampleCounter-v0", num_envs=2, backend=backend), seed=0, render=True)
    env.reset()
    play(env, random_actions(env, 2))
    frame = env.render()
    assert frame is not None
    assert frame.shape == (40, 60, 3)
    assert frame[0, 0, 0] == 2
    env.close()


def test_pixels_of_an_environment_that_shows_none_are_rendered() -> None:
    """observation=pixels and both work for anything that can be rendered."""
    pixels = make("CartPole-v1", observation="pixels", image_size=32)
    assert {key: spec.shape for key, spec in pixels.observation_spec.items()} == {"image": (32, 32, 3)}
    step = pixels.reset()
    assert step.observation["image"].dtype == np.uint8
    assert step.observation["image"].std() > 0
    both = make("CartPole-v1", observation="both", image_size=32, grayscale=True)
    assert {key: spec.shape for key, spec in both.observation_spec.items()} == {"state": (4,), "image": (32, 32, 1)}
    with pytest.raises(EnvironmentFailure, match="cannot be rendered"):
        make("ExampleFragile-v0", observation="pixels")


def test_life_loss_ends_training_episodes_only() -> None:
    """The DQN preset ends an episode with a life while the game goes on; evaluation plays whole games for the score."""
    settings = EnvironmentSettings(id="ALE/Breakout-v5", num_envs=1, backend="sync", atari={"preset": "dqn"})
    train, final = make_vector_env(settings, seed=0), make_vector_env(settings, seed=0, stream="final")
    assert train.observation_spec["image"].shape == (84, 84, 4)
    ends = []
    for env in (train, final):
        env.reset()
        ends.append([step.ended for step in play(env, random_actions(env, 250)) if step.ended is not None])
    assert [ended.info[0]["lives"] for ended in ends[0]][:3] == [4, 3, 2]
    assert all(ended.is_terminal.all() for ended in ends[0])
    assert all(ended.info[0]["lives"] == 0 for ended in ends[1])
    train.close()
    final.close()


@pytest.mark.parametrize("backend", ["sync", "process"])
def test_send_and_receive_are_a_step_in_two_halves(backend: str) -> None:
    """The same steps. What is saved in between is the state before; a return to it first ends what is under way."""
    settings = EnvironmentSettings(id="CartPole-v1", num_envs=2, backend=backend)
    plain, halves = (make_vector_env(settings, seed=3) for _ in range(2))
    plain.reset()
    halves.reset()
    actions = random_actions(plain, 40)
    for action in actions[:30]:
        halves.send(action)
        state = halves.state_dict()
        halves.load_state_dict(state)
        halves.send(action)
        assert_same_step(plain.step(action), halves.receive())
    with pytest.raises(EnvironmentFailure, match=r"receive\(\) was called without"):
        halves.receive()
    halves.send(actions[30])
    with pytest.raises(EnvironmentFailure, match="before the step under way was received"):
        halves.send(actions[31])
    for env in (plain, halves):
        env.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_seeds_are_played_once_and_then_the_environments_stand_still(backend: Any) -> None:
    """The same seed is the same episode in every environment; what was stopped or has ended is not stepped."""
    env = make("CartPole-v1", backend, num_envs=4)
    start = env.reset([5, 5, None, 6])
    np.testing.assert_array_equal(start.observation["vector"][0], start.observation["vector"][1])
    assert not np.array_equal(start.observation["vector"][0], start.observation["vector"][3])
    env.stop(np.array([3]))
    ends, last = 0, start
    for _ in range(40):
        last = env.step(np.zeros((4, 1), np.int32))
        if last.ended is not None:
            ends += 1
            np.testing.assert_array_equal(last.ended.indices, [0, 1])
            ending = last.ended.observation["vector"][0]
    assert ends == 1
    np.testing.assert_array_equal(last.observation["vector"][0], ending)
    np.testing.assert_array_equal(last.observation["vector"][3], start.observation["vector"][3])
    np.testing.assert_array_equal(last.reward, 0)
    assert env.reset().is_first.all()
    assert env.step(np.zeros((4, 1), np.int32)).reward.all()  # all play again
    env.close()


def test_car_racing_draws_only_the_pictures_that_are_looked_at() -> None:
    """With an action repeat the frames between are not drawn, and nothing else changes."""
    pytest.importorskip("Box2D")
    action = np.array([[0.3, 0.8, -1.0]], np.float32)
    single = make("CarRacing-v3", num_envs=1, normalize_actions=False)
    repeated = make("CarRacing-v3", num_envs=1, normalize_actions=False, action_repeat=4)
    single.reset()
    repeated.reset()
    frames = play(single, [action] * 12)
    decisions = play(repeated, [action] * 3)
    for index, decision in enumerate(decisions):
        four = frames[4 * index : 4 * index + 4]
        np.testing.assert_array_equal(decision.observation["image"], four[-1].observation["image"])
        np.testing.assert_allclose(decision.reward, sum(step.reward for step in four), rtol=1e-6)

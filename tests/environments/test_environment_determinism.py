"""Episodes come back by seed and actions, for every family and on both back ends."""

from __future__ import annotations

import warnings
from typing import Any

import example_environments  # noqa: F401  (registers them)
import numpy as np
import pytest
import torch
from environment_helpers import assert_same_step, play, random_actions

from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.errors import CheckpointError
from rl_lab.records import VectorStep

# id, settings, decisions before saving, decisions after it
CASES: list[tuple[str, dict[str, Any], int, int]] = [
    ("CartPole-v1", {}, 60, 40),
    ("CartPole-v1", {"frame_stack": 3, "action_repeat": 2}, 30, 20),
    ("Pendulum-v1", {"time_limit": 30}, 50, 40),
    ("LunarLander-v3", {}, 150, 120),
    ("BipedalWalker-v3", {"time_limit": 60}, 100, 70),
    ("CarRacing-v3", {"time_limit": 12}, 18, 8),
    ("HalfCheetah-v5", {"time_limit": 40}, 60, 40),
    ("ALE/Pong-v5", {"time_limit": 160, "atari": {"sticky": 0.25}}, 50, 30),
    ("ALE/Breakout-v5", {"atari": {"preset": "dqn"}}, 150, 100),
    ("ALE/Pong-v5", {"time_limit": 40, "atari": {"preset": "none"}}, 60, 30),
    ("MinAtar/SpaceInvaders-v1", {"time_limit": 30, "kwargs": {"sticky_action_prob": 0.5}}, 60, 40),
    ("MiniGrid-Empty-5x5-v0", {"time_limit": 40}, 60, 40),
    ("dm_control/cartpole-swingup-v0", {"time_limit": 40}, 60, 40),
    ("dm_control/cartpole-swingup-v0", {"time_limit": 12, "observation": "both"}, 18, 10),
]


@pytest.mark.parametrize(
    ("name", "options", "before", "after"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_a_new_environment_goes_on_where_the_saved_one_stood(
    name: str, options: dict[str, Any], before: int, after: int
) -> None:
    """Saved in mid-episode after other episodes were played, loaded elsewhere: every later number is the same."""
    if name.startswith("MinAtar/"):
        pytest.importorskip("minatar")
    settings = EnvironmentSettings(id=name, num_envs=2, backend="sync", **options)
    original, copy = (make_vector_env(settings, seed=3) for _ in range(2))
    original.reset()
    actions = random_actions(original, before + after)
    played = play(original, actions[:before])
    assert any(step.ended is not None for step in played), "the case must cover an episode's end"
    state = original.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a replay that differs warns
        restored = copy.load_state_dict(state)
    assert_same_step(restored, VectorStep(played[-1].observation, played[-1].reward, played[-1].is_first))
    for left, right in zip(play(original, actions[before:]), play(copy, actions[before:]), strict=True):
        assert_same_step(left, right)
    original.close()
    copy.close()


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 30), ("ExampleMixed-v0", 30), ("ALE/Pong-v5", 320)])
def test_both_back_ends_play_the_same_episodes(name: str, limit: int) -> None:
    """Both back ends return the same observations, and a state that one saved is loaded by the other."""
    sync, process = (
        make_vector_env(EnvironmentSettings(id=name, num_envs=3, backend=backend, time_limit=limit), seed=1)
        for backend in ("sync", "process")
    )
    assert sync.observation_spec == process.observation_spec
    assert sync.action_spec == process.action_spec
    assert_same_step(sync.reset(), process.reset())
    actions = random_actions(sync, 120)
    for left, right in zip(play(sync, actions[:100]), play(process, actions[:100]), strict=True):
        assert_same_step(left, right)
    state = process.state_dict()
    again = make_vector_env(EnvironmentSettings(id=name, num_envs=3, backend="process", time_limit=limit), seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(state)
    for action in actions[100:]:
        expected = sync.step(action)
        assert_same_step(expected, process.step(action))
        assert_same_step(expected, again.step(action))
    for env in (sync, process, again):
        env.close()


def test_state_is_loadable_without_executing_code(tmp_path: Any) -> None:
    """The saved state holds tensors and plain values only."""
    env = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=2, backend="sync"), seed=0)
    env.reset()
    play(env, random_actions(env, 10))
    torch.save(env.state_dict(), tmp_path / "state.pt")
    restored = env.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.observation["vector"].shape == (2, 4)


def test_a_nondeterministic_environment_is_named() -> None:
    """Where seed and actions lead elsewhere, the user is told, and the run goes on."""
    env = make_vector_env(EnvironmentSettings(id="ExampleUnseeded-v0", num_envs=2, backend="sync"), seed=0)
    env.reset()
    play(env, random_actions(env, 7))
    with pytest.warns(RuntimeWarning, match="not deterministic"):
        env.load_state_dict(env.state_dict())
    assert [event["kind"] for event in env.drain_events()] == ["nondeterministic_environment"]
    assert env.drain_events() == []


def test_rebuilding_cures_a_reset_that_leaves_something_behind() -> None:
    """environment.rebuild_each_episode makes every episode that of a new environment."""
    settings = EnvironmentSettings(id="ExampleLeaky-v0", num_envs=1, backend="sync", rebuild_each_episode=True)
    env = make_vector_env(settings, seed=0)
    env.reset()
    steps = play(env, random_actions(env, 12))
    assert {float(step.observation["vector"][0, 0]) for step in steps if step.is_first[0]} == {1.0}
    assert float(env.reset().observation["vector"][0, 0]) == 1.0


def test_a_state_of_other_environments_is_refused() -> None:
    env = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=2, backend="sync"), seed=0)
    other = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=3, backend="sync"), seed=0)
    env.reset()
    with pytest.raises(CheckpointError, match="2 environments"):
        other.load_state_dict(env.state_dict())


def test_held_out_seeds_do_not_depend_on_the_number_of_environments() -> None:
    """Evaluation episode k is the same however many run side by side, and is no training episode."""
    starts: dict[int, np.ndarray] = {}
    for count in (1, 2, 4):
        settings = EnvironmentSettings(id="Pendulum-v1", num_envs=count, backend="sync", time_limit=1)
        env = make_vector_env(settings, seed=0, stream="eval")
        rows = [env.reset().observation["vector"]]
        rows += [step.observation["vector"] for step in play(env, random_actions(env, 8 // count - 1))]
        starts[count] = np.concatenate(rows)
    np.testing.assert_array_equal(starts[1], starts[2])
    np.testing.assert_array_equal(starts[1], starts[4])
    train = make_vector_env(EnvironmentSettings(id="Pendulum-v1", num_envs=8, backend="sync"), seed=0).reset()
    assert not np.isin(train.observation["vector"], starts[1]).any()

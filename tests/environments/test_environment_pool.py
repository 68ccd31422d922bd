"""envpool as a back end for episodes that need not be brought back."""

from __future__ import annotations

import numpy as np
import pytest

from rl_lab.environments import EnvironmentSettings, make_vector_env
from rl_lab.errors import ConfigError


def test_a_missing_envpool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it; collection never needs it."""
    monkeypatch.setattr("rl_lab.environments.pool.find_spec", lambda name: None)
    settings = EnvironmentSettings(id="CartPole-v1", num_envs=2, backend="envpool")
    with pytest.raises(ConfigError, match=r"pip install 'rl-lab\[envpool\]'"):
        make_vector_env(settings, seed=0, stream="evolution")
    assert make_vector_env(settings, seed=0).backend == "sync"
    assert make_vector_env(settings, seed=0, stream="final").backend == "sync"  # the reported score


def test_given_seeds_are_played_once() -> None:
    """As in the other back ends: same seed, same episode; what has ended stands still."""
    pytest.importorskip("envpool")
    env = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=4, backend="envpool"), seed=0, stream="eval")
    start = env.reset([5, 5, None, 6])
    np.testing.assert_array_equal(start.observation["vector"][0], start.observation["vector"][1])
    env.stop(np.array([3]))
    ends, last = [], start
    for _ in range(30):
        last = env.step(np.zeros((4, 1), np.int32))
        ends += [] if last.ended is None else last.ended.indices.tolist()
    assert ends == [0, 1]
    np.testing.assert_array_equal(last.observation["vector"][3], start.observation["vector"][3])
    np.testing.assert_array_equal(last.reward, 0)
    again = env.reset()
    assert again.is_first.all()
    ends = [step.ended for step in (env.step(np.zeros((4, 1), np.int32)) for _ in range(30)) if step.ended is not None]
    assert sum(len(end.indices) for end in ends) >= 8  # they begin anew by themselves
    env.close()


def test_pictures_and_repeats_are_those_of_the_settings() -> None:
    """CarRacing at 64×64, four frames to a decision, rewards added up."""
    pytest.importorskip("envpool")
    settings = EnvironmentSettings(id="CarRacing-v3", num_envs=2, backend="envpool", action_repeat=4)
    env = make_vector_env(settings, seed=0, stream="evolution")
    env.reset([1, 2])
    step = env.step(np.zeros((2, 3), np.float32))
    assert step.observation["image"].shape == (2, 64, 64, 3)
    env.close()
    with pytest.raises(ConfigError, match="as they are"):
        make_vector_env(
            EnvironmentSettings(id="CartPole-v1", backend="envpool", observation="pixels"), seed=0, stream="eval"
        )

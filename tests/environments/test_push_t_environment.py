"""Push-T: its return is the published score, its pictures come without the action, and what is missing is said."""

from __future__ import annotations

import importlib

import gymnasium
import numpy as np
import pytest

from rl_lab.environments import make_vector_env
from rl_lab.environments.families import Family, family_of
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import ConfigError


def make(**arguments):
    pytest.importorskip("gym_pusht")
    family = family_of("rl_lab/PushT-v0")
    assert family is not None
    family.require("rl_lab/PushT-v0")
    return gymnasium.make("rl_lab/PushT-v0", **arguments)


def test_the_return_is_the_best_coverage() -> None:
    """Whatever is lost afterwards: the rewards of an episode add up to the largest min(coverage / 0.95, 1)."""
    env = make()
    env.reset(seed=0, options={"reset_to_state": [256, 100, 256, 256, 0.6]})
    rng, total, best = np.random.default_rng(0), 0.0, 0.0
    for _ in range(40):
        _, reward, terminated, _, info = env.step(rng.uniform(150, 350, 2).astype(np.float32))
        total, best = total + reward, max(best, min(info["coverage"] / 0.95, 1.0))
        assert reward >= 0.0
        assert isinstance(info["success"], bool)
        if terminated:
            break
    assert total == pytest.approx(best)
    assert info["coverage"] < 0.95 * best  # it lost what it had


def test_the_state_is_corners_disc_and_its_velocity() -> None:
    env = make()
    observation, info = env.reset(seed=1)
    assert observation.shape == (20,)
    assert env.observation_space.contains(observation)
    np.testing.assert_allclose(observation[16:18], np.asarray(env.unwrapped.agent.position), rtol=1e-6)
    assert info["success"] is False


def test_pixels_keep_their_size() -> None:
    pytest.importorskip("gym_pusht")
    settings = EnvironmentSettings(id="rl_lab/PushTPixels-v0", image_size=96, num_envs=1, backend="sync")
    envs = make_vector_env(settings, seed=0)
    step = envs.reset()
    envs.close()
    assert {key: value.shape[1:] for key, value in step.observation.items()} == {
        "pixels": (96, 96, 3),
        "agent_pos": (2,),
    }


def test_a_wrong_observation_is_refused() -> None:
    with pytest.raises(ConfigError, match="observation=stat: expected state or pixels"):
        make(observation="stat")


def test_a_missing_library_is_named_with_its_extra() -> None:
    found = family_of("rl_lab/PushT-v0")
    assert found is not None
    assert found.extra == "pusht"
    missing = Family(found.name, found.pattern, found.example, found.extra, ("no_such_module",))
    with pytest.raises(ConfigError, match=r"pip install 'rl-lab\[pusht\]'"):
        missing.require("rl_lab/PushT-v0")


def test_a_pymunk_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gym_pusht")
    from rl_lab.environments import push_t

    monkeypatch.setattr("importlib.metadata.version", lambda package: "7.1.0")
    with pytest.raises(ConfigError, match=r"needs pymunk below 7, and 7.1.0 is installed: pip install 'pymunk<7'"):
        importlib.reload(push_t)

"""What the tests of environments share."""

from __future__ import annotations

import numpy as np

from rl_lab.environments.base import VectorEnv
from rl_lab.records import VectorStep


def random_actions(env: VectorEnv, count: int, seed: int = 0) -> list[np.ndarray]:
    rng, spec = np.random.default_rng(seed), env.action_spec
    if spec.kind == "continuous":
        return [rng.uniform(-1, 1, (env.num_envs, *spec.shape)).astype(np.float32) for _ in range(count)]
    shape = (env.num_envs, len(spec.classes))
    return [rng.integers(0, spec.classes, shape, dtype=np.int32) for _ in range(count)]


def play(env: VectorEnv, actions: list[np.ndarray]) -> list[VectorStep]:
    return [env.step(action) for action in actions]


def assert_same_step(left: VectorStep, right: VectorStep) -> None:
    assert left.observation.keys() == right.observation.keys()
    for key, value in left.observation.items():
        np.testing.assert_array_equal(value, right.observation[key], err_msg=key)
    np.testing.assert_array_equal(left.reward, right.reward)
    np.testing.assert_array_equal(left.is_first, right.is_first)
    assert (left.ended is None) == (right.ended is None)
    if left.ended is not None and right.ended is not None:
        np.testing.assert_array_equal(left.ended.indices, right.ended.indices)
        np.testing.assert_array_equal(left.ended.reward, right.ended.reward)
        np.testing.assert_array_equal(left.ended.is_terminal, right.ended.is_terminal)
        assert left.ended.info == right.ended.info
        for key, value in left.ended.observation.items():
            np.testing.assert_array_equal(value, right.ended.observation[key], err_msg=key)

"""Small episodes for tests of datasets."""

from __future__ import annotations

import numpy as np

from rl_lab.datasets.episode import Episode

LENGTHS = (5, 3, 8)


def vector_episodes(*, rewarded: bool = True, seed: int = 0) -> list[Episode]:
    """Three episodes with vector observations and actions in Pendulum's units; the second one terminates."""
    rng = np.random.default_rng(seed)
    return [
        Episode(
            {"vector": rng.normal(size=(length + 1, 3)).astype(np.float32)},
            rng.uniform(-2.0, 2.0, (length, 1)).astype(np.float32),
            rng.normal(size=length).astype(np.float32) if rewarded else None,
            terminated=number == 1,
        )
        for number, length in enumerate(LENGTHS)
    ]


def camera_episodes(seed: int = 0) -> list[Episode]:
    """Two keys, one of them an image; discrete actions."""
    rng = np.random.default_rng(seed)
    return [
        Episode(
            {
                "camera": rng.integers(0, 256, (length + 1, 16, 16, 3), dtype=np.uint8),
                "joints": rng.normal(size=(length + 1, 2)).astype(np.float32),
            },
            rng.integers(0, 4, length),
            rng.normal(size=length).astype(np.float32),
            terminated=number == 1,
        )
        for number, length in enumerate(LENGTHS)
    ]


def assert_same(left: list[Episode], right: list[Episode]) -> None:
    """Bit for bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert sorted(one.observation) == sorted(other.observation)
        for key, value in one.observation.items():
            assert value.dtype == other.observation[key].dtype
            np.testing.assert_array_equal(value, other.observation[key])
        assert one.action.dtype == other.action.dtype
        np.testing.assert_array_equal(one.action, other.action)
        assert (one.reward is None) == (other.reward is None)
        if one.reward is not None:
            np.testing.assert_array_equal(one.reward, other.reward)
        assert one.terminated == other.terminated

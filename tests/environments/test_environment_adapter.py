"""Any Gymnasium space becomes a dict of named arrays, and the agent's actions go back into it."""

from __future__ import annotations

from typing import Any

import example_environments
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments import EnvironmentSettings, SpaceAdapter
from rl_lab.errors import EnvironmentFailure

SETTINGS = EnvironmentSettings(id="anything")


def adapt(space: spaces.Space, action: spaces.Space | None = None, **options: Any) -> SpaceAdapter:
    settings = EnvironmentSettings(id="anything", **options)
    return SpaceAdapter(space, action or spaces.Discrete(2), settings)


def test_every_observation_space_of_a_nested_dict() -> None:
    """Names are flat and safe, values have the declared shape and type, text is left out and said so."""
    env = example_environments.Mixed()
    adapter = SpaceAdapter(env.observation_space, env.action_space, SETTINGS)
    kinds = {key: (spec.kind, spec.shape, spec.classes) for key, spec in adapter.observation_spec.items()}
    assert kinds == {
        "camera": ("image", (64, 64, 3), ()),
        "dials": ("discrete", (2,), (2, 5)),
        "flags": ("vector", (3,), ()),
        "float_camera": ("image", (64, 64, 3), ()),
        "inner_gear": ("discrete", (1,), (4,)),
        "inner_pose": ("vector", (2, 2), ()),
        "pair_0": ("discrete", (1,), (2,)),
        "pair_1": ("vector", (1,), ()),
    }
    raw, _ = env.reset(seed=0)
    observation = adapter.observation(raw, first=True)
    for key, spec in adapter.observation_spec.items():
        assert observation[key].shape == spec.shape
        assert observation[key].dtype == spec.dtype
    assert observation["inner_gear"][0] == raw["inner"]["gear"] + 1
    np.testing.assert_array_equal(observation["inner_pose"], raw["inner"]["pose"].astype(np.float32))
    assert any("text" in note for note in adapter.notes)
    assert any("channels first" in note for note in adapter.notes)


def test_images_keep_their_size_where_asked_and_channels_move_last() -> None:
    adapter = adapt(spaces.Box(0, 255, (3, 40, 48), np.uint8), image_size=None)
    raw = np.random.default_rng(0).integers(0, 256, (3, 40, 48), dtype=np.uint8)
    np.testing.assert_array_equal(adapter.observation(raw)["image"], np.moveaxis(raw, 0, -1))


def test_float_images_become_bytes() -> None:
    adapter = adapt(spaces.Box(0.0, 1.0, (32, 32, 1), np.float32), image_size=None)
    image = adapter.observation(np.full((32, 32, 1), 0.5, np.float32))["image"]
    assert image.dtype == np.uint8
    assert image[0, 0, 0] == 128


def test_small_grids_are_vectors() -> None:
    """A 7×7 grid of symbols is no picture."""
    adapter = adapt(spaces.Box(0, 255, (7, 7, 3), np.uint8))
    assert adapter.observation_spec["vector"].kind == "vector"


def test_grayscale_is_luminance() -> None:
    adapter = adapt(spaces.Box(0, 255, (64, 64, 3), np.uint8), grayscale=True)
    red = np.zeros((64, 64, 3), np.uint8)
    red[..., 0] = 255
    image = adapter.observation(red)["image"]
    assert image.shape == (64, 64, 1)
    assert abs(int(image[0, 0, 0]) - 76) <= 1


def test_frames_are_stacked_oldest_first_and_refilled_at_an_episode_start() -> None:
    adapter = adapt(spaces.Box(-1, 1, (2,)), frame_stack=3)
    assert adapter.observation_spec["vector"].shape == (6,)
    seen = [
        adapter.observation(np.full(2, value), first)["vector"] for value, first in [(1, True), (2, False), (3, True)]
    ]
    np.testing.assert_array_equal(seen[0], [1] * 6)
    np.testing.assert_array_equal(seen[1], [1, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(seen[2], [3] * 6)


def test_box_actions_are_mapped_onto_their_bounds_and_clipped() -> None:
    """[-1, 1] covers [low, high] exactly; entries without bounds pass through."""
    space = spaces.Box(np.array([-2, 0, -np.inf], np.float32), np.array([2, 1, np.inf], np.float32))
    adapter = adapt(spaces.Box(-1, 1, (1,)), space)
    for agent, own in [
        ([-1, -1, -1], [-2, 0, -1]),
        ([1, 1, 1], [2, 1, 1]),
        ([0, 0, 0.5], [0, 0.5, 0.5]),
        ([9, -9, 9], [2, 0, 1]),
    ]:
        action = adapter.action(np.array(agent, np.float32))
        np.testing.assert_allclose(action, own)
        assert action.dtype == np.float32
        assert space.contains(action)
    assert any("no bounds" in note for note in adapter.notes)
    plain = adapt(spaces.Box(-1, 1, (1,)), spaces.Box(-2.0, 2.0, (1,)), normalize_actions=False)
    np.testing.assert_allclose(plain.action(np.array([0.7], np.float32)), [0.7])


@pytest.mark.parametrize(
    ("space", "agent", "classes"),
    [
        (spaces.Discrete(3, start=5), [2], (3,)),
        (spaces.MultiDiscrete([2, 3]), [1, 2], (2, 3)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), [1, 2, 3, 4], (2, 3, 4, 5)),
        (spaces.MultiBinary(3), [1, 0, 1], (2, 2, 2)),
    ],
)
def test_discrete_actions(space: spaces.Space, agent: list[int], classes: tuple[int, ...]) -> None:
    """The agent sees class indices from 0; the environment gets a member of its own space."""
    adapter = adapt(spaces.Box(-1, 1, (1,)), space)
    assert adapter.action_spec.classes == classes
    action = adapter.action(np.array(agent, np.int32))
    assert space.contains(action)
    if isinstance(space, spaces.Discrete):
        assert action == 7


def test_spaces_that_cannot_be_read_are_named() -> None:
    with pytest.raises(EnvironmentFailure, match="Sequence"):
        adapt(spaces.Dict({"list": spaces.Sequence(spaces.Discrete(2))}))
    with pytest.raises(EnvironmentFailure, match="not supported"):
        adapt(spaces.Box(-1, 1, (1,)), spaces.Tuple([spaces.Discrete(2)]))


def test_state_of_a_picture_only_environment_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match=r"environment\.observation=state"):
        adapt(spaces.Box(0, 255, (64, 64, 3), np.uint8), observation="state")


def test_the_adapter_agrees_with_the_vector_environment() -> None:
    """A raw observation of the user's own environment becomes what training saw."""
    from rl_lab.environments import make_vector_env
    from rl_lab.environments.base import episode_seed

    env = gymnasium.make("CartPole-v1")
    raw, _ = env.reset(seed=episode_seed(0, 0, 0))
    adapter = SpaceAdapter(env.observation_space, env.action_space, EnvironmentSettings(id="CartPole-v1"))
    vector = make_vector_env(EnvironmentSettings(id="CartPole-v1", num_envs=1, backend="sync"), seed=0).reset()
    np.testing.assert_array_equal(adapter.observation(raw, first=True)["vector"], vector.observation["vector"][0])

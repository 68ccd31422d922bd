"""CarRacing draws the same pictures without the polygons that nobody sees."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

pytest.importorskip("Box2D")

from rl_lab.environments.box2d import CarRacingPictures


def test_pictures_of_car_racing_are_those_of_gymnasium() -> None:
    """To the last pixel: while the camera zooms in, and on two tracks, from the road to the grass."""
    plain = gymnasium.make("CarRacing-v3", disable_env_checker=True, max_episode_steps=-1)
    quick = CarRacingPictures(gymnasium.make("CarRacing-v3", disable_env_checker=True, max_episode_steps=-1))
    calls, original = [], quick._game._draw_colored_polygon
    quick._game._draw_colored_polygon = lambda *args, **options: (calls.append(args), original(*args, **options))
    for seed in (0, 1):
        np.testing.assert_array_equal(plain.reset(seed=seed)[0], quick.reset(seed=seed)[0])
        for decision in range(70):
            action = np.array([0.4 * np.sin(decision / 9), 0.4, 0.0], np.float32)
            calls.clear()
            np.testing.assert_array_equal(plain.step(action)[0], quick.step(action)[0])
        assert len(calls) < 60  # of about 800
    plain.close(), quick.close()

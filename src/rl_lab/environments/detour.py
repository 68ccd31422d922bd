"""A point, an obstacle, and two equally good ways around it: what single-answer imitation cannot learn."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

START = (-0.6, 0.0)
GOAL = (0.8, 0.0)
START_SPREAD = 0.01
OBSTACLE_RADIUS = 0.4  # around the origin
GOAL_RADIUS = 0.1
SPEED = 0.2  # distance of one step at full action


class Detour(gymnasium.Env):
    """The observation is the position, the action a velocity. The episode ends with reward 1 at the goal, and with
    reward 0 in the obstacle; `info` says `success` and `above`, whether the obstacle was passed on the upper side."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(self, *, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Box(-2.0, 2.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._position = np.asarray(START) + self.np_random.uniform(-START_SPREAD, START_SPREAD, 2)
        self._trace, self._above = [self._position], False
        return self._position.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        before = self._position
        self._position = np.clip(before + SPEED * np.clip(action, -1.0, 1.0), -2.0, 2.0)
        self._trace.append(self._position)
        if before[0] < 0.0 <= self._position[0]:
            self._above = bool(self._position[1] > 0.0)
        success = float(np.linalg.norm(self._position - GOAL)) < GOAL_RADIUS
        collided = _distance_to_segment(before, self._position) < OBSTACLE_RADIUS
        info = {"success": success and not collided, "above": self._above}
        reward = 1.0 if info["success"] else 0.0
        return self._position.astype(np.float32), reward, success or collided, False, info

    def render(self) -> np.ndarray:
        """128 × 256 pixels: the obstacle, the goal, the way so far."""
        rows, columns = np.mgrid[0:128, 0:256]
        x, y = columns / 85.0 - 1.5, 0.75 - rows / 85.0
        picture = np.full((128, 256, 3), 245, np.uint8)
        picture[np.hypot(x, y) < OBSTACLE_RADIUS] = (120, 120, 120)
        picture[np.hypot(x - GOAL[0], y - GOAL[1]) < GOAL_RADIUS] = (90, 180, 90)
        for place in self._trace:
            picture[np.hypot(x - place[0], y - place[1]) < 0.03] = (60, 90, 200)
        return picture


def _distance_to_segment(start: np.ndarray, end: np.ndarray) -> float:
    """From the origin to the way of one step: no step jumps through the obstacle."""
    along = end - start
    length = float(along @ along)
    share = 0.0 if length == 0.0 else float(np.clip(-(start @ along) / length, 0.0, 1.0))
    return float(np.linalg.norm(start + share * along))


gymnasium.register(id="rl_lab/Detour-v0", entry_point=f"{__name__}:Detour", max_episode_steps=40)

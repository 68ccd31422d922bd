"""A point moves to a goal. It sees a picture of both, and its own velocity."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class PointGoal(gymnasium.Env):
    """Actions push the point; the reward is minus the distance; the episode ends at the goal."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, *, goal_size: float = 0.15, render_mode: str | None = None) -> None:
        self.goal_size, self.render_mode = goal_size, render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (64, 64, 3), np.uint8),
                "velocity": spaces.Box(-1.0, 1.0, (2,), np.float32),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random: draw from it and nothing else
        self.place, self.goal = self.np_random.uniform(-0.9, 0.9, (2, 2))
        self.velocity = np.zeros(2)
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.velocity = np.clip(0.8 * self.velocity + 0.1 * action, -1.0, 1.0)
        self.place = np.clip(self.place + self.velocity, -1.0, 1.0)
        distance = float(np.linalg.norm(self.place - self.goal))
        return self._observation(), -distance, distance < self.goal_size, False, {}

    def render(self) -> np.ndarray:
        picture = np.zeros((64, 64, 3), np.uint8)
        for place, colour in ((self.goal, (0, 200, 0)), (self.place, (250, 250, 250))):
            row, column = ((place + 1.0) * 29.0).astype(int)
            picture[row : row + 6, column : column + 6] = colour
        return picture

    def _observation(self) -> dict[str, np.ndarray]:
        return {"camera": self.render(), "velocity": self.velocity.astype(np.float32)}


gymnasium.register(id="PointGoal-v0", entry_point=PointGoal, max_episode_steps=100)

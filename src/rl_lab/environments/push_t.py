"""Push-T (Chi et al., 2023) as gym-pusht has it, with the return that the literature reports."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import ConfigError

if int(version("pymunk").split(".")[0]) >= 7:
    raise ConfigError(
        f"environment.id=rl_lab/PushT-v0: gym-pusht needs pymunk below 7, and {version('pymunk')} is installed: "
        "pip install 'pymunk<7'"
    )

from gym_pusht.envs.pusht import PushTEnv

SIZE = 512.0  # of the field
SPEED = 1200.0  # that the disc can reach, in pixels a second
VIDEO_SIZE = 256


class PushT(PushTEnv):
    """A disc pushes a T-shaped block onto its outline. Actions are target positions of the disc.

    The reward is how much the best score of the episode has grown, so that the return is the published score: the
    largest min(coverage / 0.95, 1) of the episode, which ends with success, or truncated after 300 decisions.

    `state`: the eight corners of the block, position and velocity of the disc, 20 numbers. `pixels`: a picture of
    96 × 96 pixels, and the position of the disc.
    """

    def __init__(self, *, observation: Literal["state", "pixels"] = "state", render_mode: str = "rgb_array") -> None:
        if observation not in ("state", "pixels"):
            raise ConfigError(f"environment.kwargs.observation={observation}: expected state or pixels.")
        self._kind = observation
        super().__init__(
            obs_type="pixels_agent_pos" if observation == "pixels" else "environment_state_agent_pos",
            render_mode=render_mode,
            visualization_width=VIDEO_SIZE,
            visualization_height=VIDEO_SIZE,
        )

    def _initialize_observation_space(self) -> None:
        super()._initialize_observation_space()
        if self._kind == "state":  # corners may leave the field before the walls push them back
            high = np.array([2 * SIZE] * 16 + [SIZE] * 2 + [SPEED] * 2, np.float32)
            low = np.array([-SIZE] * 16 + [0.0] * 2 + [-SPEED] * 2, np.float32)
            self.observation_space = spaces.Box(low, high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._best = 0.0
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"success": False, "coverage": float(self._get_coverage())}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, score, success, _, info = super().step(action)
        reward = max(float(score) - self._best, 0.0)
        self._best += reward
        return observation, reward, bool(success), False, {"success": bool(success), "coverage": info["coverage"]}

    def get_obs(self) -> Any:
        return self.state() if self._kind == "state" else super().get_obs()

    def state(self) -> np.ndarray:
        """The 20 numbers that are seen with observation=state; whoever may look at the environment has them anyway."""
        corners = self.get_keypoints(self._block_shapes).flatten()
        return np.concatenate([corners, self.agent.position, self.agent.velocity]).astype(np.float32)


gymnasium.register(id="rl_lab/PushT-v0", entry_point=f"{__name__}:PushT", max_episode_steps=300)
gymnasium.register(
    id="rl_lab/PushTPixels-v0",
    entry_point=f"{__name__}:PushT",
    max_episode_steps=300,
    kwargs={"observation": "pixels"},
)

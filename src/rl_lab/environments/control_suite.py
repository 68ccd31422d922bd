"""DeepMind Control tasks as Gymnasium environments: `dm_control/<domain>-<task>-v0`, state, pixels or both."""

from __future__ import annotations

import math
import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.wrappers import IMAGE_KEY
from rl_lab.errors import ConfigError, EnvironmentFailure, nearest

_ID = re.compile(r"^dm_control/(?P<domain>[a-zA-Z0-9_]+)-(?P<task>[a-zA-Z0-9_]+?)(-v0)?$")
_MODEL_SEED = 0  # a few domains draw their model when they are loaded (lqr): all copies must be alike


class ControlSuite(gymnasium.Env):
    """One task of dm_control.suite. An episode depends only on the seed of its reset.

    With `skips_picture` a step leaves the picture out, unless the episode ends with it: drawing takes longer than the
    physics.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, settings: EnvironmentSettings, *, render: bool) -> None:
        domain, task = parse_id(settings.id)
        from dm_control import suite

        kwargs = dict(settings.kwargs)
        task_kwargs = {"random": _MODEL_SEED, **kwargs.pop("task_kwargs", {})}
        self._env = suite.load(domain, task, task_kwargs=task_kwargs, **kwargs)
        limit = self._env._step_limit
        self.frame_limit = int(limit) if math.isfinite(limit) else None
        self._env._step_limit = math.inf  # the time limit is a setting, and always a truncation
        self._camera = settings.camera if settings.camera != "auto" else (2 if domain == "quadruped" else 0)
        self._pixels = settings.observation in ("pixels", "both")
        self._state = settings.observation != "pixels"
        self._pixel_size = settings.image_size if isinstance(settings.image_size, int) else 64
        self._render_size = settings.render_size
        self._can_render = render or self._pixels
        self.skips_picture = False
        self.observation_space = self._observation_space()
        action = self._env.action_spec()
        self.action_space = spaces.Box(
            np.broadcast_to(action.minimum, action.shape).astype(np.float32),
            np.broadcast_to(action.maximum, action.shape).astype(np.float32),
        )

    def _observation_space(self) -> spaces.Dict:
        parts: dict[str, spaces.Space] = {}
        if self._state:
            for name, spec in self._env.observation_spec().items():
                parts[name] = spaces.Box(-np.inf, np.inf, spec.shape or (1,), np.float32)
        if self._pixels:
            parts[IMAGE_KEY] = spaces.Box(0, 255, (self._pixel_size, self._pixel_size, 3), np.uint8)
        return spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.task._random = np.random.RandomState(seed)
        return self._observation(self._env.reset().observation, picture=True), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        step = self._env.step(action)
        terminated = step.last() and step.discount == 0.0
        observation = self._observation(step.observation, picture=step.last() or not self.skips_picture)
        return observation, float(step.reward or 0.0), terminated, step.last(), {}

    def _observation(self, state: Any, *, picture: bool) -> dict[str, Any]:
        observation = dict(state) if self._state else {}
        if self._pixels and picture:
            observation[IMAGE_KEY] = self._picture(self._pixel_size)
        return observation

    def _picture(self, size: int) -> np.ndarray:
        try:
            return self._env.physics.render(height=size, width=size, camera_id=self._camera)
        except Exception as error:
            raise EnvironmentFailure(
                f"MuJoCo cannot render here ({type(error).__name__}: {error}). Install libEGL (Debian: libegl1) or "
                "OSMesa (libosmesa6) and set MUJOCO_GL=egl or MUJOCO_GL=osmesa, or set environment.observation=state."
            ) from error

    def render(self) -> np.ndarray | None:
        return self._picture(self._render_size) if self._can_render else None

    def close(self) -> None:
        self._env.close()


def parse_id(environment_id: str) -> tuple[str, str]:
    """Domain and task of an id; the error names the nearest task of the suite."""
    from dm_control import suite

    known = {f"dm_control/{domain}-{task}-v0": (domain, task) for domain, task in suite.ALL_TASKS}
    match = _ID.match(environment_id)
    name = f"dm_control/{match['domain']}-{match['task']}-v0" if match else environment_id
    if name not in known:
        hint = nearest(name, known)
        raise ConfigError(f"environment.id={environment_id} is not a task of the DeepMind Control suite.{hint}")
    return known[name]

"""Changes to Gymnasium environments themselves: pixels by rendering, a quick action check."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.images import image_layout
from rl_lab.errors import EnvironmentFailure

STATE_KEY, IMAGE_KEY = "state", "image"


class PixelObservation(gymnasium.Wrapper):
    """Adds the rendered picture to the observation, unless the environment already shows one. With `skips_picture` a
    step leaves it out, unless the episode ends with it."""

    def __init__(self, env: gymnasium.Env, *, keep_state: bool) -> None:
        super().__init__(env)
        self._keep_state = keep_state
        self.skips_picture = False
        space = env.observation_space
        self._is_dict = isinstance(space, spaces.Dict)
        self._parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {STATE_KEY: space}
        self._renders = not any(_is_image(part) for part in self._parts.values())
        if not self._renders:
            self.observation_space = space
            return
        if env.render_mode != "rgb_array":
            raise EnvironmentFailure(
                "environment.observation asks for pixels, but the environment cannot be rendered: its constructor must "
                "accept render_mode='rgb_array' and render() must return an RGB array. Or set "
                "environment.observation=state."
            )
        env.reset(seed=0)
        frame = self._frame()
        image = spaces.Box(0, 255, frame.shape, np.uint8)
        self.observation_space = spaces.Dict({**self._parts, IMAGE_KEY: image} if keep_state else {IMAGE_KEY: image})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed)
        return self._observation(observation, picture=True), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        picture = terminated or truncated or not self.skips_picture
        return self._observation(observation, picture=picture), reward, terminated, truncated, info

    def _observation(self, observation: Any, *, picture: bool) -> Any:
        if not self._renders or not picture:
            return observation
        image = {IMAGE_KEY: self._frame()}
        if not self._keep_state:
            return image
        return {**(observation if self._is_dict else {STATE_KEY: observation}), **image}

    def _frame(self) -> np.ndarray:
        frame = self.env.render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise EnvironmentFailure(
                f"render() returned {type(frame).__name__} instead of a height × width × 3 uint8 array, so there are "
                "no pixels to observe. Return an RGB array for render_mode='rgb_array', or set "
                "environment.observation=state."
            )
        return frame


class WithoutPictures(gymnasium.Wrapper):
    """An environment that cannot return pictures; its own render() might open a window."""

    def render(self) -> None:
        raise NotImplementedError("it refuses render_mode='rgb_array'")


def _is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and image_layout(space.shape) is not None


class QuickDiscrete(spaces.Discrete):
    """Discrete with a membership test that costs a tenth: the adapter already gives scalars of the right type."""

    def contains(self, x: Any) -> bool:
        return bool(self.start <= x < self.start + self.n)


def quicken_action_check(env: gymnasium.Env) -> None:
    """Gymnasium's own environments test every action against their space, which costs as much as a cheap step."""
    game, space = env.unwrapped, env.unwrapped.action_space
    if type(game).__module__.startswith("gymnasium.envs.") and type(space) is spaces.Discrete:
        game.action_space = QuickDiscrete(space.n, start=space.start, dtype=space.dtype)

"""Environments that do what environments must not. Importing this module registers one id for each fault."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Result = tuple[Any, Any, Any, Any, Any]


class Sound(gymnasium.Env):
    """Nothing wrong with it: episodes of ten steps, four numbers, two actions. Faults are derived from it."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own way to say it

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.render_mode, self.count = render_mode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.count = 0
        return self.see(), {}

    def step(self, action: Any) -> Result:
        self.count += 1
        return self.see(), 1.0, self.count >= 10, False, {}

    def see(self) -> Any:
        return np.full(4, self.count, np.float32)

    def render(self) -> Any:
        return np.full((32, 32, 3), self.count, np.uint8)


def _hang() -> None:
    time.sleep(3600)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise_nothing() -> None:
    raise ValueError


DEEDS = {
    "hang": _hang,
    "exit": lambda: os._exit(3),
    "crash": _crash,
    "sys_exit": lambda: sys.exit("enough"),
    "raise": lambda: 1 / 0,
    "raise_empty": _raise_nothing,
}
# What `step` returns in place of (observation, reward, terminated, truncated, info), by position.
VALUES: dict[str, tuple[int, Any]] = {
    "scalar_observation": (0, np.float32(1.0)),
    "short_observation": (0, np.zeros(3, np.float32)),
    "text_observation": (0, "x"),
    "none_observation": (0, None),
    "nan_observation": (0, np.full(4, np.nan, np.float32)),
    "text_reward": (1, "7"),
    "none_reward": (1, None),
    "nan_reward": (1, float("nan")),
    "array_reward": (1, np.zeros(2)),
    "none_terminated": (2, None),
    "text_truncated": (3, "no"),
    "none_info": (4, None),
}


def _doing(deed: str, moment: str) -> type[Sound]:
    """An environment that does something bad when it is made, reset or stepped."""

    class Doing(Sound):
        def __init__(self, render_mode: str | None = None) -> None:
            super().__init__(render_mode)
            if moment == "init":
                DEEDS[deed]()

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
            if moment == "reset":
                DEEDS[deed]()
            return super().reset(seed=seed, options=options)

        def step(self, action: Any) -> Result:
            if moment == "step":
                DEEDS[deed]()
            return super().step(action)

    return Doing


def _returning(position: int, value: Any) -> type[Sound]:
    class Returning(Sound):
        def step(self, action: Any) -> Result:
            result = list(super().step(action))
            result[position] = value
            return tuple(result)  # type: ignore[return-value]

    return Returning


def _rendering(frame: Any) -> type[Sound]:
    """`frame` is what render() returns, or an exception that it raises."""

    class Rendering(Sound):
        def render(self) -> Any:
            if isinstance(frame, BaseException):
                raise frame
            return frame

    return Rendering


RENDERS: dict[str, Any] = {
    "not_implemented": NotImplementedError(),
    "float_frames": np.linspace(0.0, 1.0, 32 * 32 * 3).reshape(32, 32, 3),
    "large_float_frames": np.full((32, 32, 3), 200.0, np.float32),
    "grey_frames": np.full((32, 32), 9, np.uint8),
    "odd_frames": np.zeros((3, 4, 5, 6)),
    "text": "a picture",
}
BAD = {
    **{f"BadEnv-{deed}-{moment}-v0": _doing(deed, moment) for deed in DEEDS for moment in ("init", "reset", "step")},
    **{f"BadEnv-{name}-v0": _returning(*value) for name, value in VALUES.items()},
}


class HumanOnly(Sound):
    """Draws to a window alone, and refuses every other render mode when it is made, as gym-anytrading does."""

    metadata = {"render_modes": ["human"]}  # noqa: RUF012 - Gymnasium's own way to say it

    def __init__(self, render_mode: str | None = None) -> None:
        assert render_mode is None or render_mode in self.metadata["render_modes"]
        super().__init__(render_mode)


ODD_RENDERS = {f"OddRender-{name}-v0": _rendering(frame) for name, frame in RENDERS.items()}
for _name, _class in {**BAD, **ODD_RENDERS, "SoundEnv-v0": Sound, "HumanOnly-v0": HumanOnly}.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_class, max_episode_steps=50)

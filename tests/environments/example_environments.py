"""Small environments of a user's kind, importable from worker processes. Importing this module registers them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Counts its steps; terminates at `length`. Reward is the count."""

    def __init__(self, length: int = 5, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Discrete(3, start=1)
        self.length, self.count, self.render_mode = length, 0, render_mode
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.start = 0, self.np_random.uniform()
        return np.array([0.0, self.start]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.count += 1
        done = self.count >= self.length
        return np.array([self.count, self.start]), float(self.count), done, False, {"success": True, "big": np.zeros(3)}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((40, 60, 3), self.count, np.uint8)


class Mixed(gymnasium.Env):
    """Every kind of observation in nested dicts, a MultiDiscrete action."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (3, 48, 40), np.uint8),
                "float camera": spaces.Box(0.0, 1.0, (32, 32, 3), np.float32),
                "inner": spaces.Dict(
                    {"pose": spaces.Box(-1, 1, (2, 2), np.float64), "gear": spaces.Discrete(4, start=-1)}
                ),
                "flags": spaces.MultiBinary(3),
                "dials": spaces.MultiDiscrete([2, 5]),
                "pair": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, ())]),
                "text": spaces.Text(8),
            }
        )
        self.action_space = spaces.MultiDiscrete([2, 3])
        self.last_action: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.last_action = action
        return self.observation_space.sample(), float(action[1]), False, False, {}


class Fragile(Counter):
    """Fails in the way that `how` says, at the step that `at` says; only once where `marker` names a file."""

    def __init__(self, how: str = "raise", at: int = 3, marker: str | None = None, length: int = 5) -> None:
        super().__init__(length)
        self.how, self.at, self.marker = how, at, marker

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        if self.count == self.at and self._first_of_all():
            if self.how == "raise":
                raise RuntimeError("the flux capacitor broke")
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(3600)
            if self.how == "nan":
                return np.array([np.nan, 0.0]), *result[1:]  # type: ignore[return-value]
            if self.how == "shape":
                return np.zeros(7), *result[1:]  # type: ignore[return-value]
        return result

    def _first_of_all(self) -> bool:
        """Whether this is the first failure, over all processes."""
        try:
            if self.marker:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False


class Closing(Counter):
    """Does in close() what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def close(self) -> None:
        if self.how == "raise":
            raise RuntimeError("the door is stuck")
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "exit":
            os._exit(3)


class Unseeded(Counter):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count, self.start = 0, np.random.default_rng().uniform()
        return np.array([0.0, self.start]), {}


class Leaky(Counter):
    """Its reset leaves something behind: the number of episodes played shows."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episodes += 1
        return np.array([self.episodes, self.start]), {}


class OldStyle(Counter):
    """The interface of before Gymnasium: four values from step, no seed in reset."""

    def reset(self) -> Any:  # type: ignore[override]
        self.count, self.start = 0, 0.5
        return np.array([0.0, self.start])

    def step(self, action: Any) -> Any:
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class BrokenStart(Counter):
    def __init__(self) -> None:
        raise RuntimeError("no licence file found")


for _name, _class in {
    "Counter": Counter,
    "Mixed": Mixed,
    "Fragile": Fragile,
    "Closing": Closing,
    "Unseeded": Unseeded,
    "Leaky": Leaky,
    "OldStyle": OldStyle,
    "BrokenStart": BrokenStart,
}.items():
    if f"Example{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"Example{_name}-v0", entry_point=_class)
if "ExampleTimed-v0" not in gymnasium.registry:
    gymnasium.register("ExampleTimed-v0", entry_point=Counter, max_episode_steps=4, kwargs={"length": 6})

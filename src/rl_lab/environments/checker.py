"""Looks an environment over and says what is wrong with it, and how to fix it."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.adapter import SpaceAdapter, walk_space
from rl_lab.environments.factory import build_environment
from rl_lab.environments.failures import describe_value
from rl_lab.environments.images import image_layout
from rl_lab.environments.inspection import random_action
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import RLLabError

Severity = Literal["error", "warning", "note"]
_SEED = 7
_QUICK_STEPS, _THOROUGH_STEPS = 5, 50
_RESET_FIX = "Write `def reset(self, *, seed=None, options=None)` that begins with `super().reset(seed=seed)`."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    severity: Severity  # error: training cannot work. warning: it may go wrong. note: handled, good to know
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what} {self.fix}".strip()


class _StopCheck(Exception):  # noqa: N818  (not an error: the report is in the findings)
    """Nothing further can be found out."""


def check_environment(env: gymnasium.Env | EnvironmentSettings | str, *, thorough: bool = True) -> list[Finding]:
    """Play the environment for a moment and report, errors first. `thorough=False` is cheap enough for every run."""
    checker = _Checker(_THOROUGH_STEPS if thorough else _QUICK_STEPS)
    with contextlib.suppress(_StopCheck):
        checker.run(env, compare_new=thorough)
    order = ("error", "warning", "note")
    return sorted(checker.findings, key=lambda finding: order.index(finding.severity))


class _Checker:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.findings: list[Finding] = []

    def _add(self, severity: Severity, what: str, fix: str = "") -> None:
        finding = Finding(severity, what, fix)
        if finding not in self.findings:
            self.findings.append(finding)

    def _stop(self, what: str, fix: str) -> _StopCheck:
        self._add("error", what, fix)
        return _StopCheck()

    def run(self, subject: Any, *, compare_new: bool) -> None:
        if isinstance(subject, str):
            subject = EnvironmentSettings(id=subject)
        settings = subject if isinstance(subject, EnvironmentSettings) else None
        env = self._build(settings) if settings is not None else subject
        try:
            self._check(env, settings or EnvironmentSettings(id="unnamed"))
            if settings is not None and compare_new and not settings.rebuild_each_episode:
                self._compare_with_new(env, settings)
        finally:
            if settings is not None:
                env.close()

    def _build(self, settings: EnvironmentSettings) -> gymnasium.Env:
        try:
            return build_environment(settings).env
        except RLLabError as error:
            raise self._stop(str(error), "") from error

    def _check(self, env: Any, settings: EnvironmentSettings) -> None:
        if not isinstance(env, gymnasium.Env):
            raise self._stop(
                f"{type(env).__name__} is not a gymnasium.Env.",
                "Derive the class from gymnasium.Env (not from gym.Env).",
            )
        self._is_users = not type(env.unwrapped).__module__.startswith(("gymnasium.", "rl_lab."))
        self._check_spaces(env, settings)
        self._check_reset_signature(env)
        first = [self._reset(env), *self._play(env)]
        if not settings.rebuild_each_episode:
            self._compare(first, [self._reset(env), *self._play(env)])
        self._check_render(env)

    # Spaces -----------------------------------------------------------------------------------------------------------

    def _check_spaces(self, env: gymnasium.Env, settings: EnvironmentSettings) -> None:
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), spaces.Space):
                raise self._stop(
                    f"{name} is {getattr(env, name, None)!r}, not a gymnasium space.",
                    f"Set self.{name} in __init__, for example gymnasium.spaces.Box(-1, 1, (3,)).",
                )
        try:
            self._adapter = SpaceAdapter(env.observation_space, env.action_space, settings)
        except RLLabError as error:
            raise self._stop(str(error), "") from error
        for path, space in walk_space(env.observation_space):
            self._check_observation_space(".".join(map(str, path)) or "observation", space)
        action = env.action_space
        if isinstance(action, spaces.Box) and not np.all(np.isfinite(action.low) & np.isfinite(action.high)):
            self._add(
                "warning",
                "The action space has no bounds, so the agent's [-1, 1] is passed on as it is.",
                "Give the Box finite low and high: the agent's range is then mapped onto them.",
            )

    def _check_observation_space(self, name: str, space: spaces.Space) -> None:
        if isinstance(space, spaces.Text):
            self._add("note", f"'{name}' is text and is left out.")
        if not isinstance(space, spaces.Box):
            return
        layout = image_layout(space.shape)
        if space.dtype == np.float64 and self._is_users:
            self._add("note", f"'{name}' is float64 and becomes float32.", "Declare dtype=np.float32 to save the copy.")
        if layout == "chw" and space.dtype == np.uint8:
            self._add("note", f"'{name}' has its channels first; they are moved last.")
        if layout in ("hwc", "chw") and space.dtype != np.uint8:
            scaled = float(np.min(space.low)) == 0.0 and float(np.max(space.high)) in (1.0, 255.0)
            if scaled:
                self._add(
                    "note", f"'{name}' is a float picture and is stored as uint8.", "Return uint8 to save the work."
                )
            else:
                self._add(
                    "warning",
                    f"'{name}' looks like a picture but is {space.dtype} in [{np.min(space.low):g}, "
                    f"{np.max(space.high):g}], so it is treated as a vector.",
                    "Declare Box(0, 255, shape, np.uint8), or floats in [0, 1].",
                )

    # Playing ----------------------------------------------------------------------------------------------------------

    def _check_reset_signature(self, env: gymnasium.Env) -> None:
        parameters = inspect.signature(env.unwrapped.reset).parameters.values()
        if not any(item.name == "seed" or item.kind is item.VAR_KEYWORD for item in parameters):
            raise self._stop("reset() takes no seed, so episodes cannot be repeated or resumed.", _RESET_FIX)

    def _reset(self, env: gymnasium.Env) -> Any:
        try:
            result: Any = env.reset(seed=_SEED)
        except (Exception, SystemExit) as error:
            raise self._raised("reset()", error) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self._stop(
                f"reset() returned {describe_value(result)} instead of (observation, info).",
                "End it with `return observation, {}`.",
            )
        self._check_observation(env, result[0], "reset()")
        return _copy(result[0])

    def _raised(self, where: str, error: BaseException) -> _StopCheck:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return self._stop(
            f"{where} raised {_kind_and_message(error)} ({place.filename}, line {place.lineno}).",
            "Run it by itself with an action from action_space.sample() and fix what it reports.",
        )

    def _play(self, env: gymnasium.Env) -> list[Any]:
        """A short random episode, always the same actions."""
        rng, seen = np.random.default_rng(_SEED), []
        for _ in range(self._steps):
            action = self._adapter.action(random_action(self._adapter.action_spec, rng))
            try:
                result: Any = env.step(action)
            except (Exception, SystemExit) as error:
                raise self._raised(f"step({action!r})", error) from error
            observation, reward, over = self._check_step(env, result)
            seen.append((_copy(observation), reward, over))
            if over:
                break
        return seen

    def _check_step(self, env: gymnasium.Env, result: Any) -> tuple[Any, float, bool]:
        if isinstance(result, tuple) and len(result) == 4:
            raise self._stop(
                "step() returned four values: the interface of the old gym.",
                "Return (observation, reward, terminated, truncated, info): terminated where the task ended, truncated "
                "where only time ran out.",
            )
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._stop(
                f"step() returned {describe_value(result)}.",
                "Return (observation, reward, terminated, truncated, info).",
            )
        observation, reward, terminated, truncated, info = result
        self._check_observation(env, observation, "step()")
        number = self._check_reward(reward)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if flag is None:
                self._add("error", f"step() returned {name}=None.", f"Return bool({name}).")
            elif not isinstance(flag, (bool, np.bool_)):
                self._add("warning", f"step() returned {name}={flag!r}, which is not a bool.", f"Return bool({name}).")
        if not isinstance(info, dict):
            self._add("error", f"step() returned info={info!r}, which is not a dict.", "Return {} where there is none.")
        if terminated and truncated:
            self._add(
                "warning",
                "An episode was terminated and truncated at once; RL Lab takes that as terminated.",
                "Set truncated only where the task could have gone on, and leave time limits to max_episode_steps.",
            )
        return observation, number, bool(terminated or truncated)

    def _check_reward(self, reward: Any) -> float:
        value = np.asarray(reward)
        if value.dtype.kind in "biuf" and value.size == 1:
            number = float(value.reshape(()))
        else:
            several = value.dtype.kind in "biuf" and value.size > 1
            fix = "Wrap it so that it returns one, such as a weighted sum." if several else "Return float(reward)."
            raise self._stop(f"The reward {reward!r} is not a number.", fix)
        if not np.isfinite(number):
            self._add("error", f"The reward was {number}.", "Rewards must be finite: look for a division by zero.")
        return number

    def _check_observation(self, env: gymnasium.Env, observation: Any, where: str) -> None:
        space = env.observation_space
        if isinstance(space, spaces.Dict) and (
            not isinstance(observation, dict) or set(observation) != set(space.spaces)
        ):
            got = f"keys {sorted(observation)}" if isinstance(observation, dict) else describe_value(observation)
            raise self._stop(
                f"{where} returned {got}, but observation_space has the keys {sorted(space.spaces)}.",
                "Return exactly the keys that observation_space declares.",
            )
        for path, part in walk_space(space):
            value = observation
            for step in path:
                value = value[step]
            self._check_leaf(".".join(map(str, path)) or "observation", part, value, where)

    def _check_leaf(self, name: str, space: spaces.Space, value: Any, where: str) -> None:
        if not isinstance(space, spaces.Box):
            if not space.contains(value):
                self._add(
                    "error", f"{where}: '{name}' is {value!r}, outside {space}.", "Correct the value or the space."
                )
            return
        array = np.asarray(value)
        if array.dtype == object or array.dtype.kind in "US":
            raise self._stop(
                f"{where}: '{name}' is {describe_value(value)}, not an array of numbers.", "Return a NumPy array."
            )
        if array.shape != space.shape:
            raise self._stop(
                f"{where}: '{name}' has shape {array.shape}, observation_space says {space.shape}.",
                "Make both the same; a scalar needs shape ().",
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            self._add(
                "error", f"{where}: '{name}' holds NaN or infinity.", "Look for divisions by zero and divergence."
            )
        elif np.any(array < space.low) or np.any(array > space.high):
            self._add(
                "warning",
                f"{where}: '{name}' leaves its space: values in [{array.min():g}, {array.max():g}], declared "
                f"[{np.min(space.low):g}, {np.max(space.high):g}].",
                "Widen the space or correct the values.",
            )
        if array.dtype != space.dtype and not (array.dtype.kind == "f" and space.dtype.kind == "f"):
            severity: Severity = "error" if space.dtype == np.uint8 and array.dtype.kind == "f" else "warning"
            self._add(
                severity,
                f"{where}: '{name}' is {array.dtype}, observation_space says {space.dtype}.",
                f"Return it .astype(np.{space.dtype}) (after scaling to 0..255 for pictures), or correct the space.",
            )
        elif array.dtype == np.float64 and space.dtype == np.float32 and self._is_users:
            self._add("note", f"{where}: '{name}' is float64 and becomes float32.")

    # Repeating --------------------------------------------------------------------------------------------------------

    def _compare(self, first: list[Any], second: list[Any]) -> None:
        if not _same(first, second):
            self._add(
                "warning",
                "The same seed and actions led to different episodes: runs cannot be repeated, nor resumed exactly.",
                f"Draw every random number from self.np_random. {_RESET_FIX} If only reset() leaves something behind, "
                "set environment.rebuild_each_episode=true.",
            )

    def _compare_with_new(self, used: gymnasium.Env, settings: EnvironmentSettings) -> None:
        """An episode must not depend on what was played before it."""
        new = self._build(settings)
        try:
            if not _same([self._reset(used), *self._play(used)], [self._reset(new), *self._play(new)]):
                self._add(
                    "warning",
                    "An episode in a used environment differs from the same one in a new one: resuming is not exact.",
                    "Make reset() clear everything, or set environment.rebuild_each_episode=true.",
                )
        finally:
            new.close()

    def _check_render(self, env: gymnasium.Env) -> None:
        modes = (env.metadata or {}).get("render_modes") or []
        if "rgb_array" not in modes:
            self._add(
                "note",
                "The environment has no render mode rgb_array, so there are no videos of it.",
                "Add it to metadata['render_modes'], take render_mode in __init__, return an RGB array from render().",
            )


def _kind_and_message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _copy(value: Any) -> Any:
    """Environments may hand out the same buffer again and again."""
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_copy(part) for part in value)
    return np.array(value) if isinstance(value, np.ndarray) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right, equal_nan=left.dtype.kind == "f"))
    return bool(left == right) or (left != left and right != right)

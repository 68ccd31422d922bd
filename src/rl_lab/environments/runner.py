"""One environment playing episode after episode. Both vector back ends are made of these."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments.base import SeedStream, episode_seed
from rl_lab.environments.factory import BuiltEnvironment, build_environment
from rl_lab.environments.failures import describe_value, described
from rl_lab.environments.images import to_picture
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import EnvironmentFailure, RLLabError
from rl_lab.records import Observation


@dataclass(frozen=True)
class SeedPlan:
    """The seed of every episode of a vector environment. Small and picklable: workers derive seeds themselves."""

    run_seed: int
    stream: SeedStream
    num_envs: int
    first: int = 0  # number of the first environment, where other ranks have those before it

    def seed(self, env_index: int, episode: int) -> int:
        """Held-out episodes are numbered through, so that they do not depend on how many run side by side."""
        if self.stream == "train":
            return episode_seed(self.run_seed, self.first + env_index, episode, self.stream)
        return episode_seed(self.run_seed, 0, env_index + self.num_envs * episode, self.stream)


@dataclass(slots=True)
class Ending:
    """The end of an episode."""

    reward: float
    is_terminal: bool
    info: dict[str, Any]


class EpisodeRunner:
    """Steps one environment, with action repeat and time limit, and starts the next episode when one has ended.

    Observations are written into row `row` of batch arrays. `anchor` is the episode of the last true reset: the one
    that bringing the environment back starts from. It differs from `episode` where a game goes on after a lost life.
    """

    def __init__(
        self,
        *,
        settings: EnvironmentSettings,
        index: int,
        seeds: SeedPlan,
        render: bool = False,
        built: BuiltEnvironment | None = None,
    ) -> None:
        self._settings, self._index, self._seeds, self._render = settings, index, seeds, render
        self._take(built or build_environment(settings, render=render))
        self.episode = self.anchor = 0

    def _take(self, built: BuiltEnvironment) -> None:
        self._built, self._env, self.adapter = built, built.env, built.adapter
        self._env_step: Callable[[Any], tuple[Any, Any, bool, bool, dict[str, Any]]] = built.env.step
        self._write = built.adapter.writer()
        self._repeat, self._frames_per_step = built.action_repeat, built.frames_per_step
        self._limit = built.frame_limit if built.frame_limit is not None else float("inf")
        self._can_skip_pictures = hasattr(built.env, "skips_picture")
        self._frames, self._used = 0, False

    @property
    def environment(self) -> gymnasium.Env:
        """The environment that is played now; another one after `rebuild`."""
        return self._env

    def rebuild(self) -> None:
        """Put a new environment in place of the old one."""
        self._take(build_environment(self._settings, render=self._render))

    def start(self, episode: int, out: Observation, row: int, seed: int | None = None) -> None:
        """Begin the given episode, with its own seed or another one."""
        if self._settings.rebuild_each_episode and self._used:
            self.close()
            self.rebuild()
        self._used = True
        self.episode = episode
        if not getattr(self._env, "carries_over", False):
            self.anchor, self._frames = episode, 0
        raw, _ = self._env.reset(seed=self._seeds.seed(self._index, episode) if seed is None else seed)
        self._write(raw, out, row, True)

    def restart(self, episode: int, out: Observation, row: int, seed: int | None = None) -> None:
        """Begin the given episode from nothing, whatever the environment was doing."""
        if getattr(self._env, "carries_over", False):
            self._env.carries_over = False  # type: ignore[attr-defined]
        self.start(episode, out, row, seed)

    def step(self, action: Any, out: Observation, row: int) -> tuple[float, Ending | None]:
        """One decision with the environment's own action. The caller starts the next episode where this one ended."""
        if self._repeat > 1:
            raw, reward, terminated, truncated, info = self._repeated(action)
        else:
            raw, reward, terminated, truncated, info = self._env_step(action)
            self._frames += self._frames_per_step
        if type(reward) is not float or type(terminated) is not bool or type(truncated) is not bool:
            reward = self._number(reward)
            terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        if type(info) is not dict and not isinstance(info, dict):
            raise self._broken(f"info={info!r}", "a dict")
        self._write(raw, out, row, False)
        if terminated or truncated or self._frames >= self._limit:
            if not terminated and getattr(self._env, "carries_over", False):
                self._env.carries_over = False  # type: ignore[attr-defined]
            return reward, Ending(float(reward), bool(terminated), scalar_info(info))
        return reward, None

    def _repeated(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The same action for several frames. Only the last is looked at: where the others' pictures need not be drawn,
        they are not."""
        total = 0.0
        for frame in range(1, self._repeat + 1):
            self._frames += 1
            final = frame == self._repeat or self._frames >= self._limit
            if self._can_skip_pictures:
                self._env.skips_picture = not final  # type: ignore[attr-defined]
            raw, reward, terminated, truncated, info = self._env_step(action)
            total += reward if type(reward) is float else self._number(reward)
            if final or terminated or truncated:
                break
        return raw, total, terminated, truncated, info

    def _number(self, reward: Any) -> float:
        """The reward of any numeric type."""
        value = np.asarray(reward)
        if value.dtype.kind not in "biuf" or value.size != 1:
            raise self._broken(f"the reward {reward!r}", "a number")
        return float(value.reshape(()))

    def _flag(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_) and not (isinstance(value, int | np.integer) and value in (0, 1)):
            raise self._broken(f"{name}={value!r}", "a bool")
        return bool(value)

    def _broken(self, what: str, expected: str) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"environment.id={self._settings.id}: step() returned {what}, which is not {expected}. It must return"
            " (observation, reward, terminated, truncated, info)."
        )

    def replay(self, anchor: int, actions: np.ndarray, out: Observation, row: int) -> tuple[float, bool, int]:
        """Bring the environment to where it stood: reset with the anchor's seed and take the actions again.

        Returns the reward of the last step, whether it stands at the start of an episode, and the episode reached.
        """
        self.restart(anchor, out, row)
        reward, first = 0.0, True
        for action in self.adapter.actions(actions) if len(actions) else []:
            reward, ending = self.step(action, out, row)
            first = ending is not None
            if ending is not None:
                self.start(self.episode + 1, out, row)
                reward = 0.0
        return float(reward), first, self.episode

    def render(self) -> np.ndarray | None:
        """An RGB frame [height, width, 3] of bytes, or None where there is none."""
        frame = self.frame_or_reason()
        return None if isinstance(frame, str) else frame

    def frame_or_reason(self) -> np.ndarray | str:
        """The frame, or why there is none: drawing must not end a run that could go on."""
        try:
            frame: Any = self._env.render()
        except (Exception, SystemExit) as error:
            return f"render() raised {described(error)}"
        if isinstance(frame, list):
            frame = frame[-1] if frame else None
        picture = to_picture(frame)
        return picture if picture is not None else f"render() returned {describe_value(frame)}, which is no picture"

    def close(self) -> None:
        self._env.close()


@contextlib.contextmanager
def user_code(environment_id: str) -> Iterator[None]:
    """Turn an exception of the environment into an error that names it and shows where it happened."""
    try:
        yield
    except RLLabError:
        raise
    except (Exception, SystemExit) as error:
        tail = "".join(traceback.format_exception(error)[-6:]).strip()
        raise EnvironmentFailure(f"environment.id={environment_id} raised {type(error).__name__}:\n{tail}") from error


def scalar_info(info: Any) -> dict[str, Any]:
    """The entries of an episode's last info that are small enough to keep: numbers, flags and words."""
    if not isinstance(info, dict):
        return {}
    plain: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (bool, int, float, str)):
            plain[str(name)] = value
    return plain

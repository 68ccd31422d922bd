"""Builds one environment of any family, without the wrappers whose work RL Lab does itself."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.box2d import refresh_box2d_world
from rl_lab.environments.failures import described
from rl_lab.environments.families import family_of
from rl_lab.environments.headless import prepare_rendering, quiet_mujoco
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.wrappers import PixelObservation, WithoutPictures, quicken_action_check
from rl_lab.errors import ConfigError, EnvironmentFailure, RLLabError, nearest


@dataclass
class BuiltEnvironment:
    """One environment, ready to play episodes."""

    env: gymnasium.Env
    adapter: SpaceAdapter
    action_repeat: int  # what the caller still has to repeat; 1 where the environment does it itself
    frames_per_step: int  # frames that one `env.step` lasts
    frame_limit: int | None  # truncate after this many frames


def build_environment(settings: EnvironmentSettings, *, render: bool = False) -> BuiltEnvironment:
    """Build the environment that the settings name. Errors say what to install or which id was meant."""
    settings = settings.resolved()
    prepare_rendering()
    family = family_of(settings.id)
    if family is not None:
        family.require(settings.id)
        if "mujoco" in family.modules:
            quiet_mujoco()
    import_user_module(settings.module)
    pixels = settings.observation in ("pixels", "both")
    try:
        if settings.is_dm_control:
            env, limit = _dm_control(settings, render)
        elif settings.is_atari and settings.atari.preset != "none":
            env, limit = _atari(settings, render)
        else:
            env, limit = _gymnasium(settings, render or pixels)
    except RLLabError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(
            f"environment.id={settings.id} cannot be made: {described(error)}. "
            f"Its constructor was given environment.kwargs={dict(settings.kwargs)}."
        ) from error
    repeat = settings.action_repeat
    assert repeat != "auto"
    inner = repeat if hasattr(env, "action_repeat") else 1
    if settings.time_limit != "auto":
        limit = settings.time_limit
    adapter = SpaceAdapter(env.observation_space, env.action_space, settings)
    return BuiltEnvironment(env, adapter, repeat // inner, inner, limit)


def _dm_control(settings: EnvironmentSettings, render: bool) -> tuple[gymnasium.Env, int | None]:
    from rl_lab.environments.control_suite import ControlSuite

    env = ControlSuite(settings, render=render)
    return env, env.frame_limit


def _atari(settings: EnvironmentSettings, render: bool) -> tuple[gymnasium.Env, int | None]:
    import ale_py

    from rl_lab.environments.atari import AtariGame

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner for every game
    spec = find_spec(settings.id)
    kwargs = dict(settings.kwargs) | {
        "frameskip": 1,
        "repeat_action_probability": settings.atari.sticky,
        "full_action_space": settings.atari.full_action_set,
    }
    game = gymnasium.make(spec, disable_env_checker=True, max_episode_steps=-1, **kwargs).unwrapped
    return AtariGame(game, settings), spec.max_episode_steps


def _gymnasium(settings: EnvironmentSettings, render: bool) -> tuple[gymnasium.Env, int | None]:
    spec = find_spec(settings.id, settings.module)
    env = _make(spec, settings, render)
    quicken_action_check(env)
    env = refresh_box2d_world(env)
    if settings.observation in ("pixels", "both"):
        env = PixelObservation(env, keep_state=settings.observation == "both")
    return env, spec.max_episode_steps


def _make(spec: EnvSpec, settings: EnvironmentSettings, render: bool) -> gymnasium.Env:
    kwargs: dict[str, Any] = dict(settings.kwargs)
    if render:
        kwargs.setdefault("render_mode", "rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a newer version of an id, a render mode: not the user's concern here
        try:
            env = gymnasium.make(spec, disable_env_checker=True, max_episode_steps=-1, **kwargs)
        except Exception as error:
            if not render or "render_mode" in settings.kwargs:
                raise
            kwargs.pop("render_mode")  # if that was it, there may be no video, but it can be played
            env = gymnasium.make(spec, disable_env_checker=True, max_episode_steps=-1, **kwargs)
            if not isinstance(error, TypeError):  # it knows render modes and refused this one
                env = WithoutPictures(env)
    if spec.order_enforce and isinstance(env, gymnasium.wrappers.OrderEnforcing):
        env = env.env
    return env


def find_spec(environment_id: str, user_module: str | None = None) -> EnvSpec:
    """The registered spec of an id; `module:Name-v0` imports the module first."""
    module, _, name = environment_id.rpartition(":")
    if module:
        import_user_module(module)
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gymnasium.spec(name)  # resolves a name without version
    except gymnasium.error.Error as error:
        raise unknown_id(name, module or user_module) from error


def unknown_id(name: str, module: str | None = None) -> ConfigError:
    """The error for an id that nobody registered, with the nearest one that somebody did."""
    if module is not None:
        ids = _registered.get(module, [])
        what = (
            f"registered {len(ids)} others.{nearest(name, ids)}" if ids else "registered nothing; does it need a call?"
        )
        return ConfigError(f"environment.id={name} is not registered: {module} was imported and {what}")
    known = [*gymnasium.registry]
    hint = nearest(name, known)
    if hint.startswith(" Valid names"):  # hundreds of ids help nobody
        hint = (
            " `rl-lab list environments` shows the families. For an environment of your own set environment.module to "
            "the module or file that registers it, or write environment.id=module:Name-v0."
        )
    return ConfigError(f"environment.id={name} is not registered.{hint}")


_registered: dict[str, list[str]] = {}  # by user module: the ids that importing it registered


def import_user_module(module: str | None) -> None:
    """Import a module by its name, or a `.py` file by its path; the current folder is on the path."""
    if module is None:
        return
    before = set(gymnasium.registry)
    _import(module)
    _registered.setdefault(module, []).extend(sorted(set(gymnasium.registry) - before))


def _import(module: str) -> None:
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        if not module.endswith(".py"):
            importlib.import_module(module)
            return
        path = Path(module).resolve()
        if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path):
            return
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = loaded
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        fix = "Name an importable module or the path of a .py file that registers the environment."
        if "display" in f"{type(error).__name__} {error}".lower():
            fix = "It needs a display: run it under xvfb-run, or set what its renderer takes (PYGLET_HEADLESS=1)."
        raise ConfigError(f"environment.module={module} cannot be imported: {described(error)}. {fix}") from error

"""The `environment` node of the configuration: which environment, how many, and what the agent sees of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from rl_lab.errors import ConfigError, nearest

Auto = Literal["auto"]
Backend = Literal["auto", "sync", "process", "ray", "envpool"]
ObservationMode = Literal["auto", "state", "pixels", "both"]

_CHOICES = {
    "backend": ("auto", "sync", "process", "ray", "envpool"),
    "observation": ("auto", "state", "pixels", "both"),
}


@dataclass(frozen=True, kw_only=True)
class AtariSettings:
    """Preprocessing of an `ALE/…` game: a preset's values, with every value that is given here laid over them."""

    preset: str = "dreamer_100k"
    """`dreamer_100k`, `dreamer_200m`, `dqn`, or `none`: the registered environment as it is."""
    noop_max: int | None = None
    """Up to this many no-op frames (drawn from the episode's seed) before the agent takes over."""
    sticky: float | None = None
    """Probability that the emulator repeats the previous action instead of taking the new one."""
    full_action_set: bool | None = None
    """All 18 actions, or only those that the game uses."""
    max_pool: bool | None = None
    """Show the maximum of the last two frames of an action repeat, against flicker."""
    clip_reward: bool | None = None
    """Replace rewards by their sign. Training only: evaluation keeps the score."""
    terminal_on_life_loss: bool | None = None
    """End the episode when a life is lost; the game goes on in the next one. Training only."""
    fire_on_reset: bool | None = None
    """Press FIRE once after a reset in games that wait for it."""


@dataclass(frozen=True)
class AtariPreset:
    """The values that a preset gives where the user gives none."""

    image_size: int | None
    grayscale: bool
    frame_stack: int
    action_repeat: int
    time_limit: int | None
    values: dict[str, Any]


_DREAMER_100K = {
    "noop_max": 30,
    "sticky": 0.0,
    "full_action_set": False,
    "max_pool": True,
    "clip_reward": False,
    "terminal_on_life_loss": False,
    "fire_on_reset": False,
}
_DQN = _DREAMER_100K | {"clip_reward": True, "terminal_on_life_loss": True, "fire_on_reset": True}
_FRAME_CAP = 108_000  # half an hour of play

ATARI_PRESETS: dict[str, AtariPreset | None] = {
    "dreamer_100k": AtariPreset(64, False, 1, 4, _FRAME_CAP, _DREAMER_100K),
    "dreamer_200m": AtariPreset(96, True, 1, 4, _FRAME_CAP, _DREAMER_100K | {"sticky": 0.25, "full_action_set": True}),
    "dqn": AtariPreset(84, True, 4, 4, _FRAME_CAP, _DQN),
    "none": None,
}


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Everything under `environment`. A value of `auto` is decided by the environment's family (see `resolved`)."""

    id: str
    """A Gymnasium id (`CartPole-v1`, `ALE/Pong-v5`, `my_package.envs:MyEnv-v0`) or `dm_control/<domain>-<task>-v0`."""
    num_envs: int = 8
    """How many copies are stepped together."""
    backend: Backend = "auto"
    """`sync`: in this process. `process`: in worker processes. `ray`: in actors of a Ray cluster while training, and
    evaluations as `auto`. `auto`: by the measured cost of a step. `envpool`: as `auto`, but evolution and evaluations
    while training play in envpool, which must be installed."""
    observation: ObservationMode = "auto"
    """`state`: the numbers. `pixels`: images (rendered where there are none). `both`. `auto`: as it comes."""
    action_repeat: int | Auto = "auto"
    """Frames that one decision lasts; rewards are summed. `auto`: 4 for Atari, else 1."""
    image_size: int | Auto | None = "auto"
    """Height and width that image keys are resized to; null keeps their own. `auto`: 64, or the Atari preset's."""
    time_limit: int | Auto | None = "auto"
    """Frames (before action repeat) after which an episode is truncated. `auto`: the registered limit. null: none."""
    frame_stack: int | Auto = "auto"
    """Show the last n observations together: images by channel, vectors end to end where there is no image."""
    grayscale: bool | Auto = "auto"
    """Turn colour images into one luminance channel."""
    normalize_actions: bool = True
    """Map the agent's [-1, 1] onto the bounds of a Box action. False: the agent's value is used as it is, clipped."""
    atari: AtariSettings = field(default_factory=AtariSettings)
    """Preprocessing of `ALE/…` games."""
    camera: int | Auto = "auto"
    """DeepMind Control: the camera of pixel observations and videos. `auto`: 2 for quadruped, else 0."""
    render_size: int = 256
    """DeepMind Control: height and width of video frames."""
    module: str | None = None
    """A module (`my_package.envs`) or file (`my_envs.py`) that is imported first: it registers environments."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the environment's constructor."""
    rebuild_each_episode: bool = False
    """Build the environment anew for every episode: for those whose reset leaves something behind."""
    workers: int | Auto = "auto"
    """Worker processes of the `process` backend, actors of `ray`. `auto`: one per core, at most one per environment."""
    ray_address: str | None = None
    """The cluster of the `ray` backend, host:port or `auto`; null: Ray is started on this machine."""
    staleness: int | None = None
    """Of the `ray` backend. null: the actors step at the learner's word, as worker processes do. A number: they collect
    on their own, with a policy that is at most so many updates old, and a resumed run begins new episodes."""
    worker_timeout: float = 60.0
    """Seconds without an answer after which a worker counts as hung."""
    startup_timeout: float = 300.0
    """The same for building the environments, which may compile or download."""
    check: bool = True
    """Look the environment over before the first step and explain what is wrong with it."""

    def __post_init__(self) -> None:
        if isinstance(self.atari, Mapping):  # a plain mapping from YAML
            object.__setattr__(self, "atari", _build(AtariSettings, self.atari, "environment.atari"))
        elif not isinstance(self.atari, AtariSettings):
            raise ConfigError(f"environment.atari must be a mapping of settings, got {self.atari!r}")
        if not isinstance(self.kwargs, Mapping | None):
            raise ConfigError(f"environment.kwargs must be a mapping of arguments, got {self.kwargs!r}")
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))
        _validate(self)

    @classmethod
    def from_mapping(cls, node: Mapping[str, Any]) -> EnvironmentSettings:
        """Build from a configuration node; a wrong key is an error that names the nearest valid one."""
        return _build(cls, node, "environment")

    @property
    def is_atari(self) -> bool:
        return bool(re.search(r"(^|:)ALE/", self.id))

    @property
    def is_dm_control(self) -> bool:
        return self.id.startswith("dm_control/")

    def resolved(self) -> EnvironmentSettings:
        """A copy in which every `auto` that the id decides is a value. `time_limit`, `camera`, `workers` wait."""
        preset = ATARI_PRESETS[self.atari.preset] if self.is_atari else None
        values: dict[str, Any] = {
            "action_repeat": preset.action_repeat if preset else 1,
            "image_size": preset.image_size if preset else 64,
            "frame_stack": preset.frame_stack if preset else 1,
            "grayscale": preset.grayscale if preset else False,
        }
        if preset and preset.time_limit:
            values["time_limit"] = preset.time_limit
        chosen = {name: value for name, value in values.items() if getattr(self, name) == "auto"}
        return replace(self, **chosen, atari=self._resolved_atari(preset))

    def _resolved_atari(self, preset: AtariPreset | None) -> AtariSettings:
        if preset is None:
            return self.atari
        return replace(
            self.atari, **{name: value for name, value in preset.values.items() if getattr(self.atari, name) is None}
        )

    def for_evaluation(self) -> EnvironmentSettings:
        """The same task scored as it is: whole games, unclipped rewards."""
        if not self.is_atari:
            return self
        return replace(self, atari=replace(self.atari, clip_reward=False, terminal_on_life_loss=False))

    @property
    def key(self) -> str:
        """Equal for equal settings; usable as a cache key where `kwargs` is not hashable."""
        return repr(self)


def _build(cls: Any, node: Mapping[str, Any], place: str) -> Any:
    valid = [item.name for item in fields(cls)]
    for name in node:
        if name not in valid:
            raise ConfigError(f"{place}.{name} is not a setting.{nearest(str(name), valid)}")
    if "id" in valid and not node.get("id"):
        raise ConfigError(f"{place}.id is missing: name an environment, for example {place}.id=CartPole-v1")
    return cls(**node)


def _validate(settings: EnvironmentSettings) -> None:
    if not isinstance(settings.id, str) or not settings.id:
        raise ConfigError(f"environment.id must be a name such as CartPole-v1, got {settings.id!r}")
    for name, choices in _CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise ConfigError(
                f"environment.{name}={value!r} is not one of {', '.join(choices)}.{nearest(str(value), choices)}"
            )
    _whole(settings, "num_envs", least=1)
    _whole(settings, "action_repeat", least=1, auto=True)
    _whole(settings, "frame_stack", least=1, auto=True)
    _whole(settings, "image_size", least=8, auto=True, null=True)
    _whole(settings, "time_limit", least=1, auto=True, null=True)
    _whole(settings, "workers", least=1, auto=True)
    _whole(settings, "camera", least=-1, auto=True)
    _whole(settings, "staleness", least=1, null=True)
    if settings.staleness is not None and settings.backend != "ray":
        raise ConfigError("environment.staleness is for environment.backend=ray: set both, or leave it at null.")
    _whole(settings, "render_size", least=16)
    for name in ("normalize_actions", "rebuild_each_episode", "check"):
        if not isinstance(getattr(settings, name), bool):
            raise ConfigError(f"environment.{name} must be true or false, got {getattr(settings, name)!r}")
    if settings.ray_address is not None and not isinstance(settings.ray_address, str):
        raise ConfigError(f"environment.ray_address must be host:port, auto or null, got {settings.ray_address!r}")
    if settings.module is not None and not isinstance(settings.module, str):
        raise ConfigError(f"environment.module must be a module or a .py file, got {settings.module!r}")
    if settings.grayscale != "auto" and not isinstance(settings.grayscale, bool):
        raise ConfigError(f"environment.grayscale must be true, false or auto, got {settings.grayscale!r}")
    for name in ("worker_timeout", "startup_timeout"):
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise ConfigError(f"environment.{name} must be a number of seconds above 0, got {value!r}")
    _validate_atari(settings.atari)


def _whole(settings: EnvironmentSettings, name: str, *, least: int, auto: bool = False, null: bool = False) -> None:
    value = getattr(settings, name)
    if (auto and value == "auto") or (null and value is None):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        others = "".join([", or auto" if auto else "", ", or null" if null else ""])
        raise ConfigError(f"environment.{name} must be a whole number of at least {least}{others}; got {value!r}")


def _validate_atari(atari: AtariSettings) -> None:
    if atari.preset not in ATARI_PRESETS:
        raise ConfigError(
            f"environment.atari.preset={atari.preset!r} is unknown.{nearest(atari.preset, ATARI_PRESETS)}"
        )
    if atari.sticky is not None and (
        isinstance(atari.sticky, bool) or not isinstance(atari.sticky, int | float) or not 0.0 <= atari.sticky <= 1.0
    ):
        raise ConfigError(f"environment.atari.sticky must be a probability from 0 to 1, got {atari.sticky!r}")
    if atari.noop_max is not None and (not isinstance(atari.noop_max, int) or atari.noop_max < 0):
        raise ConfigError(f"environment.atari.noop_max must be a whole number of at least 0, got {atari.noop_max!r}")

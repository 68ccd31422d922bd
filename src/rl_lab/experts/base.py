"""The interface of scripted experts, and the experts by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from rl_lab.components.acting import ActingController
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import ConfigError, nearest


class Expert(ActingController):
    """A controller without anything learned, for one environment. Its actions are the agent's: [-1, 1], or classes."""

    environment: ClassVar[dict[str, Any]]  # settings of the environment that it plays
    environments: ClassVar[str]  # a regular expression over the ids that it can play

    @classmethod
    def for_environment(cls, settings: EnvironmentSettings) -> Expert:
        """The expert for one of the environments that it can play."""
        return cls()

    def watch(self, environments: list[Any]) -> None:
        """Told which environments are played, for an expert that needs more than what the agent sees."""

    @classmethod
    def settings(cls, **overrides: Any) -> EnvironmentSettings:
        return EnvironmentSettings(**{**cls.environment, **overrides})


EXPERTS = {
    "cartpole": "rl_lab.experts.classic_control.CartPoleExpert",
    "pendulum": "rl_lab.experts.classic_control.PendulumExpert",
    "point_maze": "rl_lab.experts.point_maze.PointMazeExpert",
    "car_racing": "rl_lab.experts.car_racing.CarRacingExpert",
    "push_t": "rl_lab.experts.push_t.PushTExpert",
    "detour": "rl_lab.experts.detour.DetourExpert",
}


def find_expert(name: str) -> type[Expert]:
    """The class of an expert."""
    if name not in EXPERTS:
        raise ConfigError(f"'{name}' is not an expert.{nearest(name, EXPERTS)}")
    module, _, cls = EXPERTS[name].rpartition(".")
    expert: type[Expert] = getattr(import_module(module), cls)
    return expert

"""Controllers by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from rl_lab.errors import ConfigError, nearest

RANDOM_ROLE = "random"  # built in: uniform actions, no controller object behind it


class ControllerManager:
    """The things that choose or judge actions, by role: `policy`, `critic`, `planner`, `distill_target`, …"""

    def __init__(self, controllers: Mapping[str, nn.Module]) -> None:
        self._controllers = dict(controllers)

    def get(self, role: str) -> nn.Module:
        if role not in self._controllers:
            raise ConfigError(f"No controller has the role '{role}'.{nearest(role, self._controllers)}")
        return self._controllers[role]

    def __contains__(self, role: str) -> bool:
        return role == RANDOM_ROLE or role in self._controllers

    def __iter__(self) -> Iterator[str]:
        return iter(self._controllers)

    def items(self) -> list[tuple[str, nn.Module]]:
        return list(self._controllers.items())

    def state_dict(self) -> dict[str, dict]:
        return {role: controller.state_dict() for role, controller in self._controllers.items()}

    def load_state_dict(self, state: Mapping[str, dict]) -> None:
        for role, controller in self._controllers.items():
            controller.load_state_dict(state[role])

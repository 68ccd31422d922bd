"""`_dims`: the shapes of the environment, filled in before any component is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.errors import ConfigError, nearest
from rl_lab.specs import ActionSpec, ObservationSpec


def dims_of(
    observation: Mapping[str, ObservationSpec], action: ActionSpec, episode_length: int | None = None
) -> dict[str, Any]:
    """The values that components read from `${_dims.…}`. `episode_length`: the time limit in decisions, where there
    is one."""
    return {
        "observation": {key: _plain(asdict(spec)) for key, spec in observation.items()},
        "action": _plain(asdict(action)),
        "action_size": action.encoded_size,
        "episode_length": episode_length,
    }


def fill_dims(
    config: DictConfig,
    observation: Mapping[str, ObservationSpec],
    action: ActionSpec,
    episode_length: int | None = None,
) -> None:
    """Set `_dims`. A value that the user typed must be what the environment has."""
    true = dims_of(observation, action, episode_length)
    try:
        typed = OmegaConf.to_container(config._dims, resolve=True) if config.get("_dims") else {}
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"_dims: {' '.join(str(error).split())}") from error
    if not isinstance(typed, dict):
        raise ConfigError(f"_dims must be a mapping, got {typed!r}. It is filled in from the environment.")
    for path, seen in _leaves(typed, ()):
        place = "_dims." + ".".join(path)
        node: Any = true
        for key in path:
            if not isinstance(node, Mapping) or key not in node:
                known = node if isinstance(node, Mapping) else ()
                raise ConfigError(
                    f"{place}: the environment {config.environment.id} has no such entry.{nearest(key, known)}"
                )
            node = node[key]
        if seen != node:
            raise ConfigError(
                f"{place} is {seen}, but the environment {config.environment.id} has {node}. "
                "Remove the value (it is filled in from the environment) or change environment.id."
            )
    config._dims = true


def _leaves(node: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value

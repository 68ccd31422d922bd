"""Opening the configuration of a run that may come from a stranger.

A configuration names code: `_target_` is imported and called, `environment.module` is imported. A run that was made
here may name anything, as its user could. From any other run nothing is taken that could execute code which RL Lab,
an installed plugin or a known environment family does not ship, unless the user says `--trust`.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
from omegaconf import DictConfig, OmegaConf

from rl_lab.environments.families import family_of
from rl_lab.errors import RLLabError, RunNotFoundError
from rl_lab.experiment import registry
from rl_lab.experiment.config import parse_yaml
from rl_lab.orchestration.provenance import CONFIG_FILE, origin_of
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.reading import yaml_oddity

# Packages whose classes only compute. Functions of theirs are allowed where a packaged configuration names them.
_COMPUTING = ("components", "data_sources", "losses", "nn", "simulation", "workflows")
_OWN = tuple(f"rl_lab.{name}." for name in _COMPUTING)
_TORCH = ("torch.nn.", "torch.optim.")
_TARGET = re.compile(r"_target_[\"']?\s*:\s*[\"']?([\w.]+)")


class UntrustedRunError(RLLabError):
    """A run that was not made here names something that could execute code."""


class OpenedConfig(NamedTuple):
    """A run's configuration, and whether it may name any code."""

    config: DictConfig
    is_trusted: bool


def open_config(
    run: RunDirectory, *, trust: bool, builds_environment: bool = True, sends_metrics: bool = False
) -> OpenedConfig:
    """Read a run's config.yaml and refuse what a stranger could have put there.

    `trust` is the user's word. `builds_environment` and `sends_metrics` say what the caller is going to do with it.
    """
    path = run.config_yaml
    if not path.is_file():
        raise RunNotFoundError(f"{run.path} has no config.yaml: it is not a run, or it never started.")
    content = path.read_bytes()
    origin = origin_of(run.path, content)
    misplaced = run.misplaced()
    if trust or origin.is_local:
        if misplaced is not None:
            raise RLLabError(f"{run.path} cannot be used: {misplaced}. Move it away, then try again.")
        return OpenedConfig(parse_yaml(content, path), True)
    if CONFIG_FILE in origin.changed:
        raise UntrustedRunError(
            f"{path} is not as the run wrote it (its SHA-256 is not the one in manifest.json): it is damaged or was"
            f" edited. {_advice(path)}"
        )
    odd = yaml_oddity(content)
    refused = next(_file_refusals(run.path), misplaced) or (
        f"its config.yaml has {odd}, which no run writes" if odd is not None else None
    )
    if refused is None:
        config = parse_yaml(content, path)
        plain = OmegaConf.to_container(config, resolve=False)
        assert isinstance(plain, dict)
        checks = [_node_refusals(plain)]
        if builds_environment:
            checks.append(_environment_refusals(plain.get("environment")))
            checks.append(_argument_refusals(plain.get("evaluation"), "evaluation", "environment_kwargs"))
        if sends_metrics:
            checks.append(_logging_refusals(plain.get("logging")))
        refused = next((line for check in checks for line in check), None)
        if refused is None:
            return OpenedConfig(config, False)
    raise UntrustedRunError(f"{run.path} was not made here, and {refused}. {_advice(path)}")


def _advice(path: Path) -> str:
    return f"Look at {path}; if you trust whoever made it, add --trust (in Python: trust=True)."


# What is refused ------------------------------------------------------------------------------------------------------


def _file_refusals(folder: Path) -> Iterator[str]:
    """Links, pipes and devices: writing into the run would reach through them, reading could wait for ever."""
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                continue
            inside = path == folder / "checkpoints" / "latest" and Path(os.readlink(path)).name == os.readlink(path)
            if not (stat.S_ISLNK(mode) and inside):
                yield f"{path.relative_to(folder)} is a link or a special file, which could lead elsewhere"


def _node_refusals(node: Any, place: str = "") -> Iterator[str]:
    """Targets and interpolations, wherever they stand."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{place}.{key}" if place else str(key)
            if key == "_target_" and not _is_allowed(value):
                yield f"its {where}={value} is neither in RL Lab's configurations, nor a plugin's, nor a known class"
            if "${" in str(key) or not str(key).isprintable():
                yield f"its key {where!r} is an interpolation or steers a terminal, which no run writes"
            yield from _node_refusals(value, where)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _node_refusals(value, f"{place}[{index}]")
    elif isinstance(node, str) and "${" in node:
        yield f"its {place}={node} is an interpolation, which no run writes"
    elif isinstance(node, str) and not node.replace("\n", "").isprintable():
        yield f"its {place}={node!r} has characters that steer a terminal, which no run writes"


def _environment_refusals(node: Any) -> Iterator[str]:
    if not isinstance(node, Mapping):
        return  # validation says so
    if node.get("module") is not None:
        yield f"its environment.module={node['module']} would be imported"
    name = str(node.get("id"))
    if ":" in name:
        yield f"its environment.id={name} would import a module"
    elif family_of(name) is None and name not in gymnasium.registry:
        yield f"its environment.id={name} is of no known family and not registered in this process"
    if node.get("ray_address") not in (None, "auto"):
        yield f"its environment.ray_address={node['ray_address']} is a cluster of its own choice, which sends objects"
    yield from _argument_refusals(node, "environment", "kwargs")


def _argument_refusals(node: Any, section: str, key: str) -> Iterator[str]:
    """Arguments of an environment: one that wraps another would take module:Name in them for the other's id."""
    arguments = node.get(key) if isinstance(node, Mapping) else None
    for place, text in _texts(arguments, f"{section}.{key}"):
        if ":" in text:
            yield f"its {place}={text} could name a module"


def _texts(node: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield place, node
    parts = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in parts:
        yield from _texts(value, f"{place}.{key}")


def _logging_refusals(node: Any) -> Iterator[str]:
    for name in ("wandb", "mlflow"):
        if isinstance(node, Mapping) and node.get(name):
            yield f"its logging.{name}={node[name]} would send what happens here to an address of its own choice"


# What is allowed ------------------------------------------------------------------------------------------------------


def _is_allowed(target: Any) -> bool:
    return isinstance(target, str) and (target in _named_targets() or _is_known_class(target))


@cache
def _named_targets() -> frozenset[str]:
    """Every target in RL Lab's own configuration groups and those of installed plugins."""
    files = [path for folder in registry.config_folders() for path in folder.path.rglob("*.yaml")]
    return frozenset(target for path in files for target in _TARGET.findall(path.read_text(encoding="utf-8")))


def _is_known_class(target: str) -> bool:
    """A class, never a function, that a computing package of RL Lab defines, or a module or optimiser of torch."""
    module_name, _, name = target.rpartition(".")
    if not target.startswith((*_OWN, *_TORCH)) or not all(part.isidentifier() for part in target.split(".")):
        return False
    try:
        found = getattr(import_module(module_name), name, None)
    except ImportError:
        return False
    if not inspect.isclass(found):
        return False
    if target.startswith(_OWN):
        return found.__module__.startswith(_OWN)
    from torch import nn, optim

    return issubclass(found, nn.Module | optim.Optimizer) and found.__module__.startswith(_TORCH)

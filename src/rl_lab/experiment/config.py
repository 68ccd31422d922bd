"""Composing a configuration from the packaged groups and the user's overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl_lab.errors import ConfigError, nearest
from rl_lab.experiment import registry, resolvers
from rl_lab.experiment.budgets import BUDGET_KEY, apply_typed
from rl_lab.experiment.device import resolve_device

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIG_MODULE = "rl_lab.configs"
DEFAULT_EXPERIMENT = "dreamer_v3_cartpole"
AUTO_SIZE = "auto"
RUN_SECTIONS = ("experiment", "training", "evaluation", "environment", "workflow", "_dims")  # what every run has


def compose(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path] = ()) -> DictConfig:
    """The configuration of one run, interpolations still in place. Errors name the place and the nearest valid name."""
    folders = registry.config_folders(config_dirs)
    parsed = parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(f"'{override.input_line}' names several values: add -m to train one run for each.")
    normal = normalise([override for override in parsed if override.key_or_group != BUDGET_KEY], folders)
    experiment = next(line.partition("=")[2] for line in normal if line.startswith("+experiment="))
    config = _compose(normal)
    try:
        own_budget = OmegaConf.select(config, BUDGET_KEY)
        for override in parsed:
            if override.key_or_group == BUDGET_KEY and isinstance(config._get_node("training"), DictConfig):
                OmegaConf.update(config, BUDGET_KEY, override.value())
        apply_typed(config, [override.key_or_group for override in parsed], own_budget)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    if not isinstance(config._get_node("experiment"), DictConfig):
        raise ConfigError("experiment must be a mapping of settings; +experiment=NAME picks an experiment.")
    try:
        if config.experiment.get("name") is None:
            config.experiment.name = experiment
        _choose_size(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"experiment.name or size: {one_line(error)}") from error
    return config


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for line in overrides:
        try:
            parsed.append(parser.parse_override(line))
        except HydraException as error:
            hint = _hint_for_a_word(line) if line.isidentifier() else " Quote values with special characters."
            raise ConfigError(f"'{line}' is not an override of the form key=value.{hint}") from error
    return parsed


def _hint_for_a_word(word: str) -> str:
    close = get_close_matches(word, registry.names(registry.config_folders(), "experiment"), n=1)
    if close:
        return f" Did you mean +experiment={close[0]}?"
    return " +experiment=NAME picks an experiment, training.resume_path=RUN goes on with a run."


def normalise(parsed: Sequence[Override], folders: Sequence[registry.ConfigFolder]) -> list[str]:
    """Overrides as Hydra takes them: exactly one experiment, groups checked, values added by force.

    A value whose key does not exist is let through here, so that validation can answer every unknown key alike.
    """
    known_groups = registry.groups(folders)
    lines = _searchpath(folders)
    experiments: list[str] = []
    for override in parsed:
        key, line = override.key_or_group, override.input_line or ""
        if key.startswith(("hydra.", "hydra/")) or override.is_delete():
            lines.append(line)
        elif key in known_groups and not isinstance(override.value(), Mapping):
            _check_option(override, folders)
            if key == "experiment":
                experiments.append("+" + line.lstrip("+"))
            else:
                lines.append(line)
        else:
            lines.append("++" + line.lstrip("+"))
    if len(experiments) > 1:
        raise ConfigError(f"Only one experiment can be named; these were: {', '.join(experiments)}.")
    return [*(experiments or [f"+experiment={DEFAULT_EXPERIMENT}"]), *lines]


def compose_option(group: str, option: str, overrides: Sequence[str] = ()) -> DictConfig:
    """One option of a group, such as `cem` of controllers/planners, with its own keys set. Interpolations stay."""
    folders = registry.config_folders()
    _check_choice(group, option, folders)
    place = group.replace("/", ".")
    lines = [f"++{place}.{override.input_line}" for override in parse_overrides(overrides)]
    config = _compose([*_searchpath(folders), *lines], f"{group}/{option}")
    node = OmegaConf.select(config, place)
    assert isinstance(node, DictConfig)
    return node


def _check_option(override: Override, folders: Sequence[registry.ConfigFolder]) -> None:
    value = override.value()
    for choice in getattr(value, "list", None) or (value if isinstance(value, list) else [value]):
        _check_choice(override.key_or_group, getattr(choice, "text", choice), folders)


def _check_choice(group: str, choice: Any, folders: Sequence[registry.ConfigFolder]) -> None:
    known = registry.names(folders, group)
    if choice not in known:
        shown = "null" if choice is None else str(choice)
        which = f" One environment is named by environment.id={shown}." if group == "environment" else ""
        raise ConfigError(f"{group}={shown}: there is no such {group}.{nearest(shown, known)}{which} See: rl-lab list.")


def _searchpath(folders: Sequence[registry.ConfigFolder]) -> list[str]:
    return [f"hydra.searchpath=[{','.join(_quoted(folder) for folder in folders[1:])}]"] if folders[1:] else []


def _quoted(folder: registry.ConfigFolder) -> str:
    return "'file://" + str(folder.path).replace("'", "\\'") + "'"


def _compose(lines: Sequence[str], config_name: str = "config") -> DictConfig:
    resolvers.register()
    outer = GlobalHydra.instance().hydra  # a sweep is running: composing must not end it
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra_compose(config_name, overrides=list(lines))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(one_line(error)) from error
    finally:
        GlobalHydra.instance().hydra = outer
    OmegaConf.set_struct(config, False)
    return config


def _choose_size(config: DictConfig) -> None:
    """`size: auto` becomes the preset of the device; any other value must be a preset."""
    presets = config.get("presets")
    if presets is None:
        return
    if config.get("size") == AUTO_SIZE:
        device = resolve_device(str(config.experiment.get("device", "auto")))
        config.size = config.auto_size[device.type]
    size = config.get("size")
    if size not in presets:
        raise ConfigError(f"size={size}: there is no such preset.{nearest(str(size), [*presets, AUTO_SIZE])}")


def resolve(config: DictConfig) -> dict[str, Any]:
    """Plain containers with every interpolation carried out."""
    return {str(key): resolve_node(config, str(key)) for key in config}


def resolve_node(config: DictConfig, key: str) -> Any:
    """One top-level entry as plain containers."""
    try:
        node = config[key]
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def to_yaml(config: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def parse_yaml(content: bytes, path: Path) -> DictConfig:
    """The configuration in a run's config.yaml; `path` is for the messages."""
    try:
        config = OmegaConf.create(content.decode())
    except (UnicodeDecodeError, YAMLError, OmegaConfBaseException, RecursionError, ValueError, AssertionError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(config, DictConfig) or not config:
        what = "it must be a mapping" if content.strip() else "it is empty"
        raise ConfigError(f"{path} is not a configuration: {what}.")
    for name in RUN_SECTIONS:
        if not isinstance(config._get_node(name), DictConfig):
            raise ConfigError(f"{path} is not the configuration of a run: '{name}' is not a mapping in it.")
    return config


def one_line(error: Exception) -> str:
    """Hydra and OmegaConf spread a message over lines; the place they name is `full_key`."""
    text = " ".join(str(error).split("\n    full_key")[0].split())
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and str(key) not in text else text

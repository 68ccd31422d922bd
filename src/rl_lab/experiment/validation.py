"""Checks that stop a wrong configuration before the first step: unknown keys, wrong types, values and targets."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal, TypeVar, get_args, get_origin

from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import ConfigError, nearest
from rl_lab.experiment.device import resolve_device
from rl_lab.experiment.settings import (
    SECTIONS,
    CheckpointSettings,
    EvaluationSettings,
    ExperimentSettings,
    LoggingSettings,
    TrainingSettings,
)
from rl_lab.orchestration.conditions import RECORDED, SHARES

PART_GROUPS = ("components", "controllers", "optimizers", "data_sources")
TOP_LEVEL = (*SECTIONS, "environment", "workflow", *PART_GROUPS, "run_root", "size", "auto_size", "presets", "_dims")
SETTINGS: dict[str, Any] = {**SECTIONS, "environment": EnvironmentSettings}
REFERENCE = "@"  # `@components.rssm.deter`: a value that is read off another part once it is built
WIRED_KEYS = frozenset({"_target_", "modules"})  # read by the wiring, not by the constructor
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The plain sections, checked."""

    experiment: ExperimentSettings
    training: TrainingSettings
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    logging: LoggingSettings
    environment: EnvironmentSettings


def validate(config: Mapping[str, Any]) -> Settings:
    """Check a resolved configuration from end to end; the first thing that is wrong is raised as a ConfigError."""
    settings = validate_settings(config)
    validate_parts(config)
    return settings


def validate_settings(config: Mapping[str, Any]) -> Settings:
    """Everything that needs no import of a workflow or component."""
    for key in config:
        if key not in TOP_LEVEL:
            homes = [f"{name}.{key}" for name, cls in SETTINGS.items() if key in {item.name for item in fields(cls)}]
            hint = f" Did you mean {' or '.join(homes)}?" if homes else nearest(key, TOP_LEVEL)
            raise ConfigError(f"'{key}' is not a key of the configuration.{hint}")
    if "size" in config and not config.get("presets"):
        raise ConfigError("size: this experiment has no presets, so it takes no size.")
    if not isinstance(config.get("run_root"), str) or not config["run_root"]:
        raise ConfigError(f"run_root must be a folder, got {config.get('run_root')!r}.")
    sections: dict[str, Any] = {name: section_from(name, config.get(name), cls) for name, cls in SECTIONS.items()}
    _check_name(sections["experiment"].name)
    resolve_device(sections["experiment"].device)
    if sections["evaluation"].select == "best" and sections["checkpoint"].best is None:
        raise ConfigError(
            "evaluation.select=best needs checkpoint.best, the metric that the best is chosen by (eval/return_mean)."
        )
    _check_best(sections["checkpoint"].best)
    environment = _mapping("environment", config.get("environment"))
    return Settings(**sections, environment=EnvironmentSettings.from_mapping(environment))


def _check_best(metric: str | None) -> None:
    """The metric that the best agent is chosen by is one that evaluations report."""
    known = [name for name in RECORDED if name.startswith("eval/")]
    if metric is not None and metric not in known and not metric.startswith(SHARES):
        raise ConfigError(f"checkpoint.best is '{metric}', which no evaluation reports.{nearest(metric, known)}")


def _check_name(name: str | None) -> None:
    """`experiment.name` is a folder below run_root, and must not lead out of it."""
    parts = name.split("/") if name is not None else []
    if any(not part or part.startswith(".") or not part.isprintable() for part in parts) or len(name or "") > 200:
        raise ConfigError(
            f"experiment.name={name!r} must be the name of a folder below run_root, such as my_run or group/my_run:"
            " no '..', no hidden or empty part, at most 200 characters. Other places are reached by run_root."
        )


def section_from(name: str, node: Any, cls: type[T]) -> T:
    """A settings dataclass from its node: known keys, right types, values in range."""
    node = _mapping(name, node)
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    values = {}
    for key, value in node.items():
        if key not in known:
            raise ConfigError(f"{name}.{key} is not a setting.{nearest(str(key), known)}")
        value = convert(f"{name}.{key}", value, hints[key])
        minimum = known[key].metadata.get("minimum")
        if minimum is not None and isinstance(value, (int, float)) and value < minimum:
            raise ConfigError(f"{name}.{key} must be at least {minimum}, got {value}.")
        values[key] = value
    return cls(**values)


def _mapping(name: str, node: Any) -> Mapping[str, Any]:
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        raise ConfigError(f"{name} must be a mapping of settings, got {node!r}.")
    return node


def validate_parts(config: Mapping[str, Any]) -> None:
    """Every node with a `_target_`: the class exists, takes these keys, and the values have the types it declares."""
    check_target("workflow", _mapping("workflow", config.get("workflow")))
    for group in PART_GROUPS:
        for name, node in _mapping(group, config.get(group)).items():
            check_target(f"{group}.{name}", _mapping(f"{group}.{name}", node))


def check_target(place: str, node: Mapping[str, Any]) -> None:
    target = load_target(place, node)
    known = _parameters(target)
    for key, value in node.items():
        if key in WIRED_KEYS:
            continue
        if known is not None and key not in known:
            raise ConfigError(f"{place}.{key} is not an argument of {node['_target_']}.{nearest(str(key), known)}")
        if isinstance(value, Mapping) and "_target_" in value:
            check_target(f"{place}.{key}", value)
    plain = {key: value for key, value in node.items() if key not in WIRED_KEYS and not _is_built(value)}
    convert_arguments(place, target, plain)


def convert_arguments(place: str, target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in the types that the target declares (1e3 is a whole number where it asks for one)."""
    hints = _type_hints(target)
    converted = dict(arguments)
    for key, value in arguments.items():
        if key not in hints:
            continue
        converted[key] = convert(f"{place}.{key}", value, hints[key])
        if hints[key] is int and converted[key] < 0:
            raise ConfigError(f"{place}.{key} must not be negative, got {value}.")
    return converted


def _is_built(value: Any) -> bool:
    """Whether a value becomes an object at build time, so that its type cannot be checked here."""
    return (isinstance(value, str) and value.startswith(REFERENCE)) or (
        isinstance(value, Mapping) and "_target_" in value
    )


def _parameters(target: Callable[..., Any]) -> list[str] | None:
    """Names that the target takes, through `**arguments` handed on to base classes; None: it takes any."""
    found: list[str] = []
    open_ended = True
    for function in [cls.__init__ for cls in target.__mro__] if inspect.isclass(target) else [target]:  # type: ignore[misc]
        parameters = inspect.signature(function).parameters.values()
        found += [
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
        ]
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not open_ended:
            break
    return None if open_ended else found


def load_target(place: str, node: Mapping[str, Any]) -> Callable[..., Any]:
    """The class or function that `_target_` names."""
    path = node.get("_target_")
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(
            f"{place}._target_ must name a class such as rl_lab.workflows.random.RandomWorkflow, got {path!r}."
        )
    module_name, _, attribute = path.rpartition(".")
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{place}._target_={path}: the module cannot be imported ({error}).") from error
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)]
        raise ConfigError(f"{place}._target_={path}: {module_name} has no '{attribute}'.{nearest(attribute, known)}")
    target: Callable[..., Any] = getattr(module, attribute)
    if not (inspect.isclass(target) or inspect.isfunction(target)):  # a built-in function builds no part
        raise ConfigError(f"{place}._target_={path} is neither a class nor a function that builds a part.")
    return target


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    functions = [cls.__init__ for cls in target.__mro__] if inspect.isclass(target) else [target]  # type: ignore[misc]
    hints: dict[str, Any] = {}
    for function in functions:
        try:
            hints = typing.get_type_hints(function) | hints
        except (NameError, TypeError):  # a type that only a checker can see; its keys go unchecked
            continue
    return hints


def convert(place: str, value: Any, hint: Any) -> Any:
    """The value as the declared type, or a ConfigError. Types beyond plain ones, lists and mappings are let through."""
    options = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    simple = [_simple(option) for option in options]
    if any(kind is None for kind in simple):
        return value
    literals: list[Any] = []
    for option in options:
        if get_origin(option) is Literal:
            literals.extend(get_args(option))
    if any(value == literal and type(value) is type(literal) for literal in literals):
        return value
    for kind in simple:
        if kind is int and isinstance(value, float) and value.is_integer() and float not in simple:
            return int(value)  # 1e6
        if kind is tuple and isinstance(value, list):
            return tuple(value)
        if kind is float and isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{place} must be a finite number, got {value}.")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if (
            isinstance(kind, (type, tuple))
            and isinstance(value, kind)
            and (kind is bool or not isinstance(value, bool))
        ):
            return value
    expected = [str(literal) for literal in literals] + [_NAMES[kind] for kind in simple if kind in _NAMES]
    hint_text = nearest(str(value), map(str, literals)) if literals and isinstance(value, str) else ""
    raise ConfigError(f"{place} must be {' or '.join(expected)}, got {value!r}.{hint_text}")


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
    Mapping: "a mapping",
    (list, tuple): "a list",
    tuple: "a list",
}


def _simple(option: Any) -> Any:
    """The runtime class that stands for a type, `Literal` for literals, None where it is not checked."""
    if option in (bool, int, float, str, type(None)):
        return option
    origin = get_origin(option)
    if origin is Literal:
        return Literal
    if origin is tuple or option is tuple:
        return tuple
    if origin in (list, Sequence) or option is list:
        return (list, tuple)
    if origin in (dict, Mapping) or option is dict:
        return Mapping
    return None

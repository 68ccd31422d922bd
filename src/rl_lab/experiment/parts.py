"""Building what `_target_` names. A value `@components.rssm.feature_size` is read off a part that is built first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rl_lab.errors import ConfigError, RLLabError, nearest
from rl_lab.experiment.validation import REFERENCE, convert_arguments, load_target

MODULE_GROUPS = ("components", "controllers")


class PartBuilder:
    """Builds components and controllers on demand, each once, so that they may refer to each other in any order."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._nodes = {
            f"{group}.{name}": node for group in MODULE_GROUPS for name, node in (config.get(group) or {}).items()
        }
        self._built: dict[str, Any] = {}
        self._open: list[str] = []

    def group(self, name: str) -> dict[str, Any]:
        """All parts of `components` or `controllers`, in the order of the configuration."""
        prefix = name + "."
        return {place.removeprefix(prefix): self.part(place) for place in self._nodes if place.startswith(prefix)}

    def part(self, place: str) -> Any:
        if place not in self._built:
            if place in self._open:
                raise ConfigError(f"{' → '.join([*self._open, place])}: these parts refer to each other in a circle.")
            self._open.append(place)
            self._built[place] = self.make(place, self._nodes[place])
            self._open.pop()
        return self._built[place]

    def make(self, place: str, node: Mapping[str, Any], **further: Any) -> Any:
        """Call the node's target with its other keys as arguments."""
        target = load_target(place, node)
        arguments = {key: self._value(f"{place}.{key}", value) for key, value in node.items() if key != "_target_"}
        arguments = convert_arguments(place, target, arguments)
        try:
            return target(**further, **arguments)
        except RLLabError as error:
            raise type(error)(f"{place}: {error}") from error
        except TypeError as error:
            raise ConfigError(f"{place}: {_argument_problem(error, arguments)}") from error

    def _value(self, place: str, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(REFERENCE):
            return self._referred(place, value)
        if isinstance(value, Mapping):
            if "_target_" in value:
                return self.make(place, value)
            return {key: self._value(f"{place}.{key}", entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._value(f"{place}[{index}]", entry) for index, entry in enumerate(value)]
        return value

    def _referred(self, place: str, text: str) -> Any:
        words = text.removeprefix(REFERENCE).split(".")
        source = ".".join(words[:2])
        if source not in self._nodes:
            raise ConfigError(f"{place}={text}: there is no {source}.{nearest(source, self._nodes)}")
        value = self.part(source)
        for word in words[2:]:
            if word.startswith("_") or not hasattr(value, word):
                raise ConfigError(f"{place}={text}: {type(value).__name__} has no '{word}'.")
            value = getattr(value, word)
        return value


def _argument_problem(error: TypeError, arguments: Mapping[str, Any]) -> str:
    """Python's message about a wrong or missing argument, without the class's internals."""
    text = str(error)
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unexpected and unexpected[1] in arguments:
        return f"'{unexpected[1]}' is not one of its settings."
    missing = re.search(r"missing \d+ required .*?: (.*)", text)
    return f"{missing[1]} must be given." if missing else text


def build_optimizers(
    config: Mapping[str, Any], builder: PartBuilder, modules: Mapping[str, nn.Module]
) -> dict[str, torch.optim.Optimizer]:
    """Each optimiser on the trainable parameters of the modules that it names; `all` is every module, `rest` every one
    that no other optimiser names. A mapping gives some settings of their own: `{encoder: {lr: 1e-4}, model: {}}`."""
    optimizers, nodes = {}, config.get("optimizers") or {}
    named = {module for node in nodes.values() for module in _names(node) or ()}
    for name, node in nodes.items():
        place = f"optimizers.{name}"
        chosen = node.get("modules", "all")
        names = _names(node) or [module for module in modules if chosen == "all" or module not in named]
        for module in names:
            if module not in modules:
                raise ConfigError(f"{place}.modules names '{module}'.{nearest(module, ['all', 'rest', *modules])}")
        trained = {module: [p for p in modules[module].parameters() if p.requires_grad] for module in names}
        if not any(trained.values()):
            raise ConfigError(f"{place}.modules={chosen}: these have no trainable parameters.")
        parameters: list[Any] = [value for own in trained.values() for value in own]
        if isinstance(chosen, Mapping):
            parameters = [
                {"params": own, "name": module, **(chosen[module] or {})} for module, own in trained.items() if own
            ]
        rest = {key: value for key, value in node.items() if key != "modules"}
        optimizers[name] = builder.make(place, rest, params=parameters)
        if not isinstance(optimizers[name], torch.optim.Optimizer):
            raise ConfigError(f"{place}._target_={node.get('_target_')} is not an optimiser.")
    return optimizers


def _names(node: Mapping[str, Any]) -> list[str] | None:
    """The modules that an optimiser lists; None where it says `all` or `rest`."""
    chosen = node.get("modules", "all")
    if chosen in ("all", "rest"):
        return None
    return [chosen] if isinstance(chosen, str) else list(chosen)


def parameter_counts(components: Mapping[str, Any], controllers: Mapping[str, Any]) -> dict[str, int]:
    """Trainable parameters by part; one that two parts share counts for the first."""
    counts: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in [*components.items(), *controllers.items()]:
        if not isinstance(module, nn.Module):
            continue
        own = [value for value in module.parameters() if value.requires_grad and id(value) not in seen]
        seen.update(map(id, own))
        if own:
            counts[name] = sum(value.numel() for value in own)
    return counts

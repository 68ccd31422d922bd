"""Digests of the code and of the settings that a result rests on, so that a later change of either is seen.

The code is every definition (class, function, constant) that can be reached by name from the parts that a configuration
names and from the loop that runs them. Only what is computed counts: docstrings, comments, annotations, layout, imports
and the words of errors do not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import rl_lab
from rl_lab.environments.families import family_of

SOURCE = Path(rl_lab.__file__).parent
LOOP = (  # what is learned from which data and when, how environments are stepped and episodes are played
    "rl_lab.environments.factory.build_environment",
    "rl_lab.environments.runner.EpisodeRunner",
    "rl_lab.environments.sync.SyncVectorEnv",
    "rl_lab.experiment.parts.PartBuilder",
    "rl_lab.experiment.parts.build_optimizers",
    "rl_lab.orchestration.evaluation.evaluate",
    "rl_lab.orchestration.orchestrator.Orchestrator._own",
    "rl_lab.orchestration.orchestrator.Orchestrator._take_in",
    "rl_lab.orchestration.orchestrator.Orchestrator._update",
    "rl_lab.orchestration.phases.parse_phases",
    "rl_lab.orchestration.scheduler.PhaseScheduler",
)
# Definitions elsewhere do not count: logs, pictures, commands, and kernels, which tests hold to the plain code.
COUNTED = (
    "buffers", "components", "data_sources", "datasets", "environments", "experiment.parts", "experts", "losses", "nn",
    "orchestration", "records", "simulation", "specs", "workflows",
)  # fmt: skip
# Nor do these: saving and moving data, other ways to step the same environments, checks, importing a user's module.
LEFT_OUT = (
    "buffers.journal", "buffers.saving", "environments.checker", "environments.factory.import_user_module",
    "environments.failures", "environments.families", "environments.group", "environments.headless",
    "environments.inspection", "environments.make_vector_env", "environments.pool", "environments.process",
    "environments.ray_actors", "environments.shared_arrays", "environments.worker", "environments.worker_handle",
    "orchestration.checkpoint", "orchestration.recorder", "orchestration.run_directory", "workflows.diagnosis",
)  # fmt: skip
OF_FAMILIES = {  # modules that only environments with such ids use
    "environments.atari": r"(^|:)ALE/", "environments.box2d": "^(CarRacing|LunarLander|BipedalWalker)",
    "environments.control_suite": "^dm_control/",
}  # fmt: skip
NOT_LEARNING = (  # settings that say how a run is watched, kept and computed
    "_dims", "checkpoint.every", "checkpoint.keep", "environment.backend", "environment.check",
    "environment.render_size", "environment.startup_timeout", "environment.worker_timeout", "environment.workers",
    "evaluation.final_episodes", "evaluation.imagination", "evaluation.num_envs", "evaluation.video", "experiment",
    "logging", "presets", "run_root", "size", "training.compile", "training.kernels", "training.overlap",
    "training.resume_path", "training.threads",
)  # fmt: skip
_UNREAD = {"annotation", "ctx", "kind", "msg", "returns", "type_comment", "type_params"}


def digests(config: Mapping[str, Any], *, source: Path = SOURCE) -> dict[str, str]:
    """Two hashes that mark a result: `code`, of all code that a resolved configuration reaches, and `settings`, of its
    values that steer learning. `source`: the folder of another version of RL Lab, to hash its code."""
    code = [f"{name}\n{text}" for name, text in sorted(definitions(config, source=source).items())]
    return {"code": _digest("\n".join(code)), "settings": _digest(json.dumps(settings(config), sort_keys=True))}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that steer learning, by their dotted names. One that is null is as one that is not there."""
    return {name: value for name, value in _leaves(config, ()) if value is not None and not _within(name, NOT_LEARNING)}


def definitions(config: Mapping[str, Any], *, source: Path = SOURCE) -> dict[str, str]:
    """The code of every definition that this configuration reaches, without docstrings and annotations, by its dotted
    name. `source`: the folder of another version of RL Lab."""
    environment = config["environment"]["id"]
    unused = tuple(module for module, ids in OF_FAMILIES.items() if re.search(ids, environment) is None)
    family = family_of(environment)
    waiting = [*_targets(config), *LOOP, *([family.registers] if family is not None and family.registers else [])]
    found: dict[str, str] = {}
    while waiting:
        definition = _definition(waiting.pop(), source)
        if definition is None or definition.name in found or not _counts(definition.name, unused):
            continue
        if definition.nodes:
            found[definition.name] = "\n".join(map(_text, definition.nodes))
        waiting.extend(definition.used)
    return found


def _counts(name: str, unused: tuple[str, ...]) -> bool:
    part = name.removeprefix("rl_lab.")
    return _within(part, COUNTED) and not _within(part, (*LEFT_OUT, *unused))


def _within(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` within a configuration."""
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _targets(part)


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield ".".join(path), node


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Reading modules ------------------------------------------------------------------------------------------------------


class Definition(NamedTuple):
    name: str
    nodes: list[ast.AST]
    used: list[str]  # dotted names of what it uses


class Module(NamedTuple):
    definitions: dict[str, list[ast.AST]]  # by name; those of a module's other statements under ""
    imports: dict[str, str]  # the dotted name behind each imported one


@cache
def _definition(name: str, source: Path) -> Definition | None:
    """A class, function, constant or method by its dotted name. A module stands for all that it defines, a name that
    a module imports for what it was imported from. None for what is not RL Lab's."""
    module = next((place for place in _prefixes(name) if _file(place, source) is not None), None)
    if module is None:
        return None
    own, imports = _module(module, source)
    symbol, _, member = name.removeprefix(module).removeprefix(".").partition(".")
    if not name.startswith(f"{module}."):
        return Definition(module, own.get("", []), [f"{module}.{symbol}" for symbol in own if symbol])
    if symbol not in own:
        further = [".".join(filter(None, (imports[symbol], member)))] if symbol in imports else []
        return Definition(name, [], further)
    nodes = own[symbol]
    if member and name not in LOOP:  # an attribute of a class or of a constant
        return Definition(name, [], [f"{module}.{symbol}"])
    if member:
        nodes = [part for node in nodes for part in getattr(node, "body", []) if getattr(part, "name", None) == member]
    inner = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom)]
    imports = imports | {word: origin for node in inner for word, origin in _imported(node).items()}
    used = []
    for word in {word for node in nodes for word in _names(node)}:
        head, _, rest = word.partition(".")
        if head in imports:
            used.append(".".join(filter(None, (imports[head], rest))))
        elif head in own:
            used.append(f"{module}.{head}")
        elif head == "rl_lab":  # a text that names a part
            used.append(word)
    return Definition(".".join(filter(None, (module, symbol, member))), nodes, used)


def _prefixes(name: str) -> Iterator[str]:
    words = name.split(".")
    if words[0] == "rl_lab":
        yield from (".".join(words[:end]) for end in range(len(words), 0, -1))


def _file(module: str, source: Path) -> Path | None:
    place = source.joinpath(*module.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _module(module: str, source: Path) -> Module:
    path = _file(module, source)
    assert path is not None
    own: dict[str, list[ast.AST]] = {}
    imports: dict[str, str] = {}
    for node in _computed(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                own.setdefault(name.id, []).append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= _imported(node)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            own.setdefault("", []).append(node)
    return Module(own, imports)


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
            for alias in node.names}  # fmt: skip


# What code computes ---------------------------------------------------------------------------------------------------


def _computed(body: list[Any]) -> list[Any]:
    """Statements without docstrings."""
    return [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def _children(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """The fields that decide what is computed. What is empty is left out: versions of Python differ in it."""
    if isinstance(node, ast.Raise):  # the words of an error are left out
        yield "exc", node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _UNREAD:
            continue
        if isinstance(value, list) and name in ("body", "orelse", "finalbody"):
            value = [part for part in _computed(value) if not isinstance(part, ast.Import | ast.ImportFrom)]
        if value is not None and value != []:
            yield name, value


def _text(value: Any) -> str:
    if isinstance(value, ast.AST):
        return f"{type(value).__name__}({', '.join(f'{name}={_text(part)}' for name, part in _children(value))})"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else repr(value)


def _names(node: ast.AST) -> Iterator[str]:
    """Names that are used, with their attributes (`graphs.capture`), and texts that may name a part of RL Lab."""
    words: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        words.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield ".".join([inner.id, *words])
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("rl_lab."):
        yield node.value.replace(":", ".")
    for _, value in _children(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _names(part)

"""A digest of the code and of the settings that a result rests on, so that a later change of either is seen."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import rl_lab
from rl_lab.experiment.config import compose

SOURCE = Path(rl_lab.__file__).parent
# What steers learning. The loop, its logs and pictures, commands and kernels must not change a score.
LEARNING = (
    "buffers", "components", "data_sources", "datasets", "environments", "experts", "losses", "nn", "simulation",
    "workflows",
)  # fmt: skip
NOT_LEARNING = ("logging", "run_root", "checkpoint", "evaluation")  # sections of a configuration


def code_digest(config: Mapping[str, Any]) -> str:
    """Of every module that this configuration names with `_target_` and of those that they import, without comments,
    docstrings and empty lines."""
    modules: dict[str, str] = {}
    waiting = [module for target in _targets(config) if (module := _module_of(target)) is not None]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module], imported = _module_code(module)
            waiting.extend(imported)
    return _digest(*(f"{name}\n{modules[name]}" for name in sorted(modules)))


def settings_digest(experiment: str, overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> str:
    """Of the composed configuration of an experiment, as far as it steers learning; the seed is left out."""
    config = compose([f"+experiment={experiment}", *overrides], config_dirs=config_dirs)
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    kept = {name: section for name, section in content.items() if name not in NOT_LEARNING}
    kept["experiment"] = {name: value for name, value in kept["experiment"].items() if name != "seed"}
    return _digest(OmegaConf.to_yaml(OmegaConf.create(kept), sort_keys=True))


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` within a configuration."""
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _targets(part)


def _module_of(name: str) -> str | None:
    """The longest part of a dotted name that is one of our learning modules; None where none is."""
    words = name.split(".")
    if words[0] != "rl_lab" or len(words) < 2 or words[1] not in LEARNING:
        return None
    for end in range(len(words), 1, -1):
        if _file(".".join(words[:end])) is not None:
            return ".".join(words[:end])
    return None


def _file(module: str) -> Path | None:
    place = SOURCE.joinpath(*module.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _module_code(module: str) -> tuple[str, tuple[str, ...]]:
    """The code of a module, and which of our learning modules it imports."""
    path = _file(module)
    assert path is not None
    source = path.read_text(encoding="utf-8")
    imported: set[str | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imported |= {_module_of(f"{node.module}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {_module_of(alias.name) for alias in node.names}
    return _code_alone(source), tuple(sorted(name for name in imported if name is not None))


def _code_alone(source: str) -> str:
    """Without comments, docstrings, and lines that are empty then. What is left stays as it was typed, because other
    versions of Python cut it into other tokens."""
    lines = source.splitlines()
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if token.type == tokenize.COMMENT or docstring:
            (first, start), (last, end) = token.start, token.end
            lines[first - 1 : last] = [lines[first - 1][:start] + lines[last - 1][end:]]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

"""Fingerprints of the plain functions that kernels compute."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_lab.kernels import sources
from rl_lab.kernels.catalogue import KERNELS

PLAIN = '''
def function(x, y=1):
    """Says what it does."""
    # and why
    total = x + y
    return {"a": total, "b": 2 * total}
'''
SAME = {
    "comments": PLAIN.replace("# and why", "# quite another reason"),
    "docstring": PLAIN.replace("Says what it does.", "Says it in\n    other words."),
    "no docstring": PLAIN.replace('    """Says what it does."""\n', ""),
    "layout": PLAIN.replace('{"a": total, "b"', '{\n        "a": total,\n\n        "b"'),
}
OTHER = {
    "operator": PLAIN.replace("x + y", "x - y"),
    "number": PLAIN.replace("2 * total", "3 * total"),
    "default": PLAIN.replace("y=1", "y=2"),
    "string": PLAIN.replace('"a"', '"c"'),
    "line": PLAIN.replace("    return", "    total += 1\n    return"),
    "order": PLAIN.replace("x + y", "y + x"),
}
numbers = itertools.count()


@pytest.fixture
def print_of(tmp_path: Path) -> Callable[[str], str]:
    """The fingerprint of the function in a module with this text."""

    def fingerprint(text: str) -> str:
        name = f"edited_{next(numbers)}"
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return sources._fingerprint_of(module.function)

    return fingerprint


@pytest.mark.parametrize("edit", SAME)
def test_words_and_layout_do_not_count(print_of: Callable[[str], str], edit: str) -> None:
    assert SAME[edit] != PLAIN
    assert print_of(SAME[edit]) == print_of(PLAIN)


@pytest.mark.parametrize("edit", OTHER)
def test_every_change_of_the_computation_does(print_of: Callable[[str], str], edit: str) -> None:
    assert OTHER[edit] != PLAIN
    assert print_of(OTHER[edit]) != print_of(PLAIN)


def test_a_function_without_source_is_never_the_same() -> None:
    assert sources._fingerprint_of(len) == ""


@pytest.mark.parametrize("name", sorted({name for kernel in KERNELS for name in kernel.mirrors}))
def test_recorded_fingerprints_are_those_of_the_present_functions(name: str) -> None:
    """After a change its kernels must compute the new function; then `python -m rl_lab.kernels.sources` renews it."""
    assert sources.changed_source([name]) is None


def test_nothing_else_is_recorded() -> None:
    """And nothing is recorded as a function that was not found."""
    prints = json.loads(sources.FILE.read_text())
    assert set(prints) == {name for kernel in KERNELS for name in kernel.mirrors}
    assert all(prints.values())


def test_a_mirrored_function_that_is_gone_is_an_error() -> None:
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        sources.find("rl_lab.nn.layers.MLP.no_such_method")

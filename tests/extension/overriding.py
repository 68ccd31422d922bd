"""Subclasses that change the result of one method, and note that it was called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from rl_lab.kernels.graphs import CapturedStep, Watch

Kind = TypeVar("Kind", bound=type)


def overriding(base: Kind, name: str, calls: list[str]) -> Kind:
    """A subclass whose method `name` gives another result than its parent's."""

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if name not in calls:  # once: compiled code is made anew whenever a list that it reads has grown
            calls.append(name)
        return altered(getattr(super(kind, self), name)(*arguments, **named))

    kind = type(f"My{base.__name__}", (base,), {name: method})
    return kind  # type: ignore[return-value]


def altered(value: Any) -> Any:
    """The same structure with other numbers."""
    if isinstance(value, Tensor):
        value = value.flip(-1) if value.ndim else value
        return 0.7 * value + 0.1 if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: altered(part) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [altered(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def assert_differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> None:
    """Some entry of the results is not what it was."""
    assert one.keys() == other.keys()
    same = [torch.equal(one[key], other[key]) for key in one]
    assert not all(same), f"{name} was overridden, and nothing changed"


@contextmanager
def counted_captures() -> Iterator[list[CapturedStep]]:
    """Captured steps run without a GPU and its graphs; the list tells how often each was captured."""
    captures: list[CapturedStep] = []

    def capture(self: Any, inputs: Mapping[str, Tensor]) -> None:
        self._watch, self._graph = Watch(self._modules), "a graph"
        captures.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedStep, "_capture", capture)
        patch.setattr(CapturedStep, "_replay", lambda self, inputs: self._function(dict(inputs)))
        yield captures


def assert_captured_anew(run: Any, layer: nn.Module) -> None:
    """`run` holds one captured step. It is captured once, and again for a hook that comes later or goes."""
    with counted_captures() as captures:
        run()
        run()
        assert len(captures) == 1
        hook = layer.register_forward_hook(lambda module, inputs, output: 0.5 * output)
        run()
        run()
        assert len(captures) == 2, "a hook that came after the capture is not seen"
        hook.remove()
        run()
        assert len(captures) == 3

"""The checks of annotations that all tests run with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from tests.checks import check_annotations
from torch import Tensor


def make_inner() -> Callable[..., Tensor]:
    @jaxtyped(typechecker=check_annotations)
    def inner(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x + y[:1]

    return inner


def test_every_copy_of_an_inner_function_is_checked() -> None:
    """Whatever sizes the copies before it met: arguments by each other, and the result by them."""
    for size in (3, 2):
        assert len(make_inner()(torch.zeros(size), torch.ones(size))) == size
        for wrong in (torch.ones(size + 1), torch.ones(size, dtype=torch.int32), 1.0):
            with pytest.raises(TypeCheckError):
                make_inner()(torch.zeros(size), wrong)


def test_inner_functions_of_one_name_keep_their_own_annotations() -> None:
    """The checks that were cached for one of them must not be used for the other."""

    def make(kind: type) -> Callable[..., object]:
        def inner(x):
            return x

        inner.__annotations__ = {"x": kind, "return": kind}
        return jaxtyped(inner, typechecker=check_annotations)

    assert (make(int)(1), make(str)("a")) == (1, "a")
    with pytest.raises(TypeCheckError):
        make(str)(1)

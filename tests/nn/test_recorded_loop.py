"""Recorded loops against autograd through the same loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_lab.nn.recorded_loop import RecordedLoop

T, B, SIZE = 5, 3, 4


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)


def step(x: Tensor, y: Tensor, push: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A state of two parts, a copy of the first as an output, and one more output."""
    x, y = torch.tanh(x @ weight + push), torch.sigmoid(y * x)
    return x, y, x.clone(), (x * y) @ weight


def by_autograd(state: tuple[Tensor, ...], pushes: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for push in pushes:
        *state, first, second = step(*state, push, weight)
        outputs.append((first, second))
    return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))


def start() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, SIZE, dtype=torch.float64, generator=generator) for _ in range(2))


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().sum() + outputs[1].sin().sum()


def test_replaying_all_steps_at_once_gives_the_gradients_of_the_loop(weight):
    """Weights and inputs: the loop itself sees none that require gradients."""
    pushes = torch.randn(T, B, SIZE, dtype=torch.float64, requires_grad=True)
    expected = by_autograd(start(), pushes, weight)
    loop = RecordedLoop(step, start())
    for push in pushes:
        loop.advance((), (push, weight))
    outputs = loop.replayed(*step(*loop.before(), pushes, weight))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss(outputs), (weight, pushes)), torch.autograd.grad(loss(expected), (weight, pushes))
    )


def test_driving_inputs_get_their_gradients_from_the_loop(weight):
    """What chose them from the states, without a gradient by these, learns from all steps at once."""
    chooser = torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
    fixed = weight.detach()
    state, expected = start(), []
    for _ in range(T):
        *state, first, second = step(*state, state[0].detach() @ chooser, fixed)
        expected.append((first, second))
    expected = tuple(torch.stack(parts) for parts in zip(*expected, strict=True))
    loop = RecordedLoop(step, start())
    for _ in range(T):
        loop.advance((loop.state[0] @ chooser,), (fixed,))
    outputs = loop.driven_by(loop.before()[0] @ chooser)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss(outputs), chooser), torch.autograd.grad(loss(expected), chooser)
    )


def test_an_output_that_no_loss_uses_has_no_gradient(weight):
    """Autograd then gives zeros for it."""
    pushes = torch.randn(T, B, SIZE, dtype=torch.float64)
    loop = RecordedLoop(step, start())
    for push in pushes:
        loop.advance((), (push, weight))
    (_, second) = loop.replayed(*step(*loop.before(), pushes, weight))
    expected = by_autograd(start(), pushes, weight)[1]
    torch.testing.assert_close(torch.autograd.grad(second.sum(), weight), torch.autograd.grad(expected.sum(), weight))

"""Loops over time whose backward pass carries the gradients of states alone.

Autograd computes the gradient of every weight in every step of a loop and adds them up: many small kernels. But once
the loop has run, all its states are known. So its steps are recorded with the weights held fixed, and whatever has
weights is computed once more, for all steps at once, with their gradients; the loop's outputs are then attached to
that. Going back, the loop says what the gradient of each step is, and each weight's is one product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tensors = tuple[Tensor, ...]
Step = Callable[..., Tensors]  # (*state, *driving, *given) -> (*next state, *outputs)


class RecordedLoop:
    """Runs `step` after `step`, each with an autograd graph of its own, by its state and its driving inputs.

    All tensors that a step gives must depend on these and be different ones: what is wanted of the next state is given
    a second time, as an output. Weights inside the step must not require gradients.
    """

    def __init__(self, step: Step, state: Tensors) -> None:
        self.state = _detached(state)
        self._step, self._steps = step, list[tuple[Tensors, Tensors]]()

    def advance(self, driving: Tensors, given: Tensors) -> None:
        """One step. Only `driving` inputs get gradients."""
        leaves = tuple(tensor.requires_grad_() for tensor in _detached((*self.state, *driving)))
        with torch.enable_grad():
            results = self._step(*leaves, *_detached(given))
        self._steps.append((leaves, results))
        self.state, _ = self._cut(_detached(results))

    def before(self) -> Tensors:
        """The states before all steps, time first."""
        return _stacked([self._cut(_detached(leaves))[0] for leaves, _ in self._steps])

    def replayed(self, *results: Tensor) -> Tensors:
        """The outputs of all steps, time first, with the gradient of `results`: those of the same steps, taken again
        all at once."""
        return _Attached.apply(self, True, *results)

    def driven_by(self, *driving: Tensor) -> Tensors:
        """The same with the gradient of `driving`: the driving inputs of all steps, computed again."""
        return _Attached.apply(self, False, *driving)

    def outputs(self) -> Tensors:
        return _stacked([self._cut(_detached(results))[1] for _, results in self._steps])

    def backward(self, grads: Tensors) -> tuple[Tensors, Tensors]:
        """From the gradients of the outputs, those of each step's next state and of its driving inputs."""
        grads = tuple(grad.contiguous() for grad in grads)
        state, by_state, by_driving = tuple(torch.zeros_like(part) for part in self.state), [], []
        for t in reversed(range(len(self._steps))):
            leaves, results = self._steps[t]
            by_state.append(state)
            state, driving = self._cut(torch.autograd.grad(results, leaves, (*state, *(grad[t] for grad in grads))))
            by_driving.append(driving)
        return _stacked(by_state[::-1]), _stacked(by_driving[::-1])

    def _cut(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """The state, and what follows it."""
        return tensors[: len(self.state)], tensors[len(self.state) :]


class _Attached(torch.autograd.Function):
    """The outputs of a loop as a function of something that was computed after it."""

    @staticmethod
    def forward(ctx: Any, loop: RecordedLoop, results: bool, *sources: Tensor) -> Tensors:
        ctx.loop, ctx.results = loop, results
        return loop.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_state, by_driving = ctx.loop.backward(grads)
        return None, None, *((*by_state, *grads) if ctx.results else by_driving)


def _detached(tensors: Tensors) -> Tensors:
    return tuple(tensor.detach() for tensor in tensors)


def _stacked(steps: Sequence[Tensors]) -> Tensors:
    return cast(Tensors, tuple(torch.stack(parts) for parts in zip(*steps, strict=True)))

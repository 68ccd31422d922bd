"""Loops over time whose weight gradients are deferred: each weight's gradient is one product over all steps.

Autograd computes the gradient of every weight in every step of a loop and adds them up: many small kernels. But once
the loop has run, all its states are known. So the steps run with the weights held fixed, and whatever has weights is
computed once more, for all steps at once, with their gradients; the loop's outputs are then attached to that. In the
backward pass the loop gives the gradient of each step's state, and the second computation the weights'.

It calls a model's own `observe_step` and `predict_step`, which must treat rows independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_lab.kernels.copies import WorkingCopies
from rl_lab.kernels.graphs import compile_block

Tensors = tuple[Tensor, ...]
Step = Callable[..., Tensors]  # (*state, *driving, *given) -> (*next state, *outputs)


class DeferredLoop:
    """Runs `step` after `step`, each with an autograd graph of its own, by its state and its driving inputs.

    The tensors that a step returns must be distinct and depend on these inputs: a state that is also an output is
    returned twice. Weights inside the step must not require gradients.
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
    def forward(ctx: Any, loop: DeferredLoop, results: bool, *sources: Tensor) -> Tensors:
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


# Filtering ------------------------------------------------------------------------------------------------------------


class DeferredFiltering:
    """`StateSpaceModel.observe` for a recurrent model without further memory; products are computed in `dtype`."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.copies = model, dtype, WorkingCopies(dtype)
        self._copy = self.copies.add(model)
        self._step, self._all_steps = compile_block(self._copied_step), compile_block(self._steps_at_once)

    def __call__(
        self, embed: Tensor, prev_action: Tensor, is_first: Tensor, initial: Any, noise: Tensor
    ) -> tuple[Any, Tensor]:
        self.copies.refresh()
        keep = (~is_first).t().unsqueeze(-1).to(self.dtype)
        action = prev_action.transpose(0, 1).to(self.dtype) * keep
        given = keep, action, embed.transpose(0, 1).to(self.dtype), noise
        loop = DeferredLoop(self._step, (initial.deter.to(self.dtype), initial.stoch.to(self.dtype)))
        for step in zip(*given, strict=True):
            loop.advance((), step)
        results = self._all_steps(*loop.before(), *given)
        deter, stoch, params = (part.transpose(0, 1) for part in loop.replayed(*results))
        return type(initial)(deter, stoch), params

    def _copied_step(self, deter: Tensor, stoch: Tensor, *given: Tensor) -> Tensors:
        return _filter(self._copy, deter, stoch, *given)

    def _steps_at_once(self, deter: Tensor, stoch: Tensor, *given: Tensor) -> Tensors:
        """All steps [t, b] as rows, with the model's own weights."""
        lead = deter.shape[:2]
        results = _filter(self.model, *(part.flatten(0, 1) for part in (deter, stoch, *given)))
        return tuple(part.unflatten(0, lead) for part in results)


def _filter(
    model: Any, deter: Tensor, stoch: Tensor, keep: Tensor, action: Tensor, embed: Tensor, noise: Tensor
) -> Tensors:
    state = model.latent(deter * keep, stoch * keep)
    state, params = model.observe_step(state, action, embed, noise)
    return state.deter, state.stoch, state.deter.clone(), state.stoch.clone(), params


_filterings: WeakKeyDictionary[nn.Module, DeferredFiltering] = WeakKeyDictionary()


def observe(
    model: Any, embed: Tensor, prev_action: Tensor, is_first: Tensor, initial: Any, noise: Tensor
) -> tuple[Any, Tensor]:
    """`StateSpaceModel.observe`. The state before the first step gets no gradient."""
    if model not in _filterings:
        device = embed.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        _filterings[model] = DeferredFiltering(model, dtype)
    return _filterings[model](embed, prev_action, is_first, initial, noise)


def supports_observe(model: Any) -> str | None:
    return None if torch.is_grad_enabled() else "nothing is differentiated"

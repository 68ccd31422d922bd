"""Finds where a NaN or an infinity came from: runs the losses again and looks at every module's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rl_lab.records import Batch
    from rl_lab.workflows.base import Workflow


def find_nonfinite(workflow: Workflow, batch: Batch) -> str:
    """One sentence: which loss and which tensor was first. Batch and parameters are looked at before the modules."""
    modules = _named_modules(workflow)
    for name, tensor in _batch_tensors(batch):
        if _bad(tensor):
            return f"the batch itself: {name} holds {_describe(tensor)}"
    for group, module in modules.items():
        for name, parameter in module.named_parameters():
            if _bad(parameter):
                return f"the parameter {group}.{name}, which holds {_describe(parameter)}"
    return _trace(workflow, batch, modules)


def _trace(workflow: Workflow, batch: Batch, modules: Mapping[str, nn.Module]) -> str:
    first: list[str] = []
    handles = []
    for group, module in modules.items():
        for name, part in module.named_modules():
            label = f"{group}.{name}" if name else group

            def look(part: nn.Module, inputs: Any, output: Any, label: str = label) -> None:
                bad = next((value for value in _tensors(output) if _bad(value)), None) if not first else None
                if bad is not None:
                    first.append(f"the output of {label} ({type(part).__name__}), which holds {_describe(bad)}")

            handles.append(part.register_forward_hook(look))
    try:
        with torch.no_grad():
            terms = workflow.batch_losses(batch)
    except NotImplementedError:
        return "unknown: the workflow does not expose its losses"
    finally:
        for handle in handles:
            handle.remove()
    losses = [name for name, value in terms.items() if _bad(value)]
    tensor = first[0] if first else "not the output of a module"
    if losses:
        return f"the loss '{losses[0]}'; the first bad tensor was {tensor}"
    if first:
        return f"no loss, though a tensor was bad: {tensor}"
    return (
        "not found: every loss of the saved batch is finite when it is computed again, so it arose in the backward pass"
    )


def _named_modules(workflow: Workflow) -> dict[str, nn.Module]:
    context = workflow.context
    named = {f"components.{name}": module for name, module in context.components.items()}
    named.update({f"controllers.{role}": controller for role, controller in context.controllers.items()})
    return {name: module for name, module in named.items() if isinstance(module, nn.Module)}


def _batch_tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for key, value in batch.observation.items():
        yield f"observation.{key}", value
    yield "action", batch.action
    yield "reward", batch.reward
    yield from batch.extras.items()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _bad(value: Tensor) -> bool:
    return value.is_floating_point() and not bool(torch.isfinite(value).all())


def _describe(value: Tensor) -> str:
    nans, infinities = int(torch.isnan(value).sum()), int(torch.isinf(value).sum())
    parts = [f"{nans} NaN"] * bool(nans) + [f"{infinities} infinite"] * bool(infinities)
    return f"{' and '.join(parts)} of {value.numel()} values"

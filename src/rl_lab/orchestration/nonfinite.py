"""What happens when a loss is NaN or infinite: find where it began, keep the batch, follow `training.on_nonfinite`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab import ranks
from rl_lab.errors import ConfigError, NonFiniteError, nearest
from rl_lab.metrics.values import Metrics, TensorMetrics
from rl_lab.orchestration.randomness import forked_random
from rl_lab.orchestration.run_directory import RunDirectory
from rl_lab.records import Batch
from rl_lab.workflows.base import Workflow

Policy = Literal["stop", "skip", "rollback"]
MAX_ROLLBACKS = 3
MAX_REPORTS = 10  # of skipped updates: after that they are only counted


def first_bad(metrics: Metrics) -> str | None:
    """The name of the first metric that is not finite. One device read for TensorMetrics."""
    if isinstance(metrics, TensorMetrics):
        if math.isfinite(metrics.values_vector.sum()):  # the quick test: it is seldom that anything is wrong
            return None
        finite = torch.isfinite(metrics.values_vector).tolist()
        return None if all(finite) else metrics.names[finite.index(False)]
    for name, value in metrics.items():
        if not (bool(torch.isfinite(value).all()) if isinstance(value, Tensor) else math.isfinite(value)):
            return name
    return None


def nonfinite_parameter(modules: Mapping[str, nn.Module]) -> str | None:
    """The first parameter that holds NaN or infinity (`actor.head.weight`). One sum a tensor, one read of the device: a
    sum of what is not finite is not finite, and one that overflows is looked at again."""
    named = {
        f"{name}.{own}": value.detach() for name, module in modules.items() for own, value in module.named_parameters()
    }
    if not named or bool(torch.stack([value.sum() for value in named.values()]).isfinite().all()):
        return None
    return next((name for name, value in named.items() if not bool(value.isfinite().all())), None)


class NonFiniteGuard:
    """Decides on bad updates. The optimisers have refused to apply them already."""

    def __init__(self, *, policy: Policy, run: RunDirectory, workflow: Workflow) -> None:
        if policy not in get_args(Policy):
            raise ConfigError(f"training.on_nonfinite is '{policy}'.{nearest(policy, get_args(Policy))}")
        self.policy, self._run, self._workflow = policy, run, workflow
        self.skipped = 0
        self.rollbacks = 0

    def handle(self, metric: str, batch: Batch | None, *, updates: int, env_steps: int) -> Policy:
        """Report a bad value; returns what is to be done, or raises where the run is to stop."""
        if self.policy == "skip" and self.skipped >= MAX_REPORTS:
            self.skipped += 1
            return "skip"
        path = self._save_batch(batch, updates) if batch is not None else None
        source = "unknown: no batch is at hand"
        if batch is not None:
            with forked_random(updates):
                source = self._workflow.diagnose(batch)
        message = (
            f"{metric} became NaN or infinite in update {updates} (env step {env_steps}). First: {source}."
            f"{f' The batch is in {path}.' if path else ''}"
        )
        self._run.event("nonfinite", message, env_steps)
        if self.policy == "skip":
            self.skipped += 1
            return "skip"
        return self._rollback_or_stop(
            message,
            "Lower the learning rate or look at the batch; training.on_nonfinite=skip leaves such updates out,"
            " =rollback goes back to the last checkpoint.",
        )

    def handle_parameter(self, name: str, *, updates: int, env_steps: int) -> None:
        """Report a parameter that a finite gradient made infinite, before it is saved; returns where the run goes back
        to its last checkpoint. Leaving updates out helps no more."""
        message = (
            f"The parameter {name} is NaN or infinite after update {updates} (env step {env_steps}), so no checkpoint"
            " was written: those before it stand."
        )
        self._run.event("nonfinite", message, env_steps)
        self._rollback_or_stop(message, "Lower the learning rate; training.on_nonfinite=rollback goes back by itself.")

    def _rollback_or_stop(self, message: str, advice: str) -> Policy:
        if self.policy == "rollback" and self.rollbacks < MAX_ROLLBACKS:
            self.rollbacks += 1
            return "rollback"
        tried = f" {self.rollbacks} rollbacks did not help." if self.rollbacks else ""
        raise NonFiniteError(f"{message}{tried} {advice}")

    def _save_batch(self, batch: Batch, updates: int) -> Path:
        folder = self._run.path / "nonfinite"
        folder.mkdir(exist_ok=True)
        share = "" if ranks.is_first() else f"-rank-{ranks.rank()}"
        path = folder / f"batch-{updates}{share}.pt"
        torch.save(_to_cpu(batch), path)
        return path

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Rollbacks are counted by the process: the run that goes on meets the same ones again."""
        self.skipped = state["skipped"]


def _to_cpu(value: object) -> object:
    """Tensors and plain containers only, so that the file loads without executing code."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {name: _to_cpu(part) for name, part in value.items()}
    if is_dataclass(value):
        return {field.name: _to_cpu(getattr(value, field.name)) for field in fields(value)}
    return value

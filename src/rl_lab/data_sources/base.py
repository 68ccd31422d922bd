"""The interface of everything that yields training batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rl_lab.records import Batch, BatchSpec, FieldSpec, RecordBlock, VectorStep


@dataclass(frozen=True)
class SourceContext:
    """What a data source learns about the run before the first record arrives."""

    fields: Mapping[str, FieldSpec]  # every field that records will carry
    num_envs: int
    device: str
    seed: int
    folder: Path  # where a disk-backed source keeps its files


class DataSource(ABC):
    """Where batches come from. The phase names one; collected records are added to it and updates sample from it."""

    @abstractmethod
    def prepare(self, context: SourceContext) -> None: ...

    @abstractmethod
    def add(self, block: RecordBlock) -> None:
        """Take over one record of some environments. A field that the block lacks is stored as zeros."""

    def follow(self, step: VectorStep) -> None:  # noqa: B027
        """Told after a decision's blocks what the agent acts on next, for sources that need each record's successor."""

    @abstractmethod
    def ready(self, spec: BatchSpec) -> bool:
        """Whether `sample(spec)` can be answered now."""

    @abstractmethod
    def sample(self, spec: BatchSpec) -> Batch: ...

    def update(self, indices: Tensor | np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        """Write fields of stored records anew (latents, priorities, re-analysed targets); gone ids are skipped."""
        raise NotImplementedError(f"{type(self).__name__} does not store fields that can be updated")

    @abstractmethod
    def __len__(self) -> int:
        """Records held now."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that the source will need when full: keys `ram`, `gpu`, `disk`."""

    @abstractmethod
    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Plain values and tensors; large arrays are written into `folder` (a part of the checkpoint being made)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None: ...

    def committed(self) -> None:  # noqa: B027
        """Told after the checkpoint that holds the last `state_dict` is safely on disk."""

    def close(self) -> None:  # noqa: B027
        """Release files and threads."""

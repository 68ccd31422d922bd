"""The interface of everything that yields training batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from rl_lab import ranks
from rl_lab.components.acting import Acts
from rl_lab.datasets.statistics import FieldStatistics
from rl_lab.environments.adapter import ActionConverter
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.errors import CheckpointError
from rl_lab.records import Batch, BatchSpec, FieldSpec, RecordBlock, RecordScan, VectorStep
from rl_lab.simulation.service import SimulatorService


@dataclass(frozen=True)
class SourceContext:
    """Facts about the run that a data source gets before the first record arrives."""

    fields: Mapping[str, FieldSpec]  # every field that records will carry
    num_envs: int
    device: str
    seed: int
    folder: Path  # where a disk-backed source keeps its files
    actions: ActionConverter | None = None  # between the agent's actions and the environment's own
    environment: EnvironmentSettings | None = None
    sources: Mapping[str, DataSource] = field(default_factory=dict)  # all of the run, by name; some not prepared yet
    simulator: SimulatorService | None = None  # the workflow's model
    agent: Acts | None = None  # who acts in the run


class Wait(NamedTuple):
    """Records that updates wait for. `each_time`: they use up what was collected, and wait for as many again."""

    records: int = 0
    each_time: bool = False


class DataSource(ABC):
    """A source of batches. The phase names one; collected records are added to it and updates sample from it."""

    prefilled: ClassVar[bool] = False  # whether it holds data before the run starts
    takes_records: ClassVar[bool] = True  # whether a phase may collect into it
    statistics: Mapping[str, FieldStatistics] | None = None  # by field, where all data are there already

    @abstractmethod
    def prepare(self, context: SourceContext) -> None: ...

    @abstractmethod
    def add(self, block: RecordBlock) -> None:
        """Take over one record of some environments. A field that the block lacks is stored as zeros."""

    def follow(self, step: VectorStep) -> None:  # noqa: B027
        """Told after a decision's blocks what the agent acts on next, for sources that need each record's successor."""

    def check(self, spec: BatchSpec) -> None:  # noqa: B027
        """Raise a DataError where batches of this kind can never be drawn. Called before the first step."""

    @abstractmethod
    def ready(self, spec: BatchSpec) -> bool:
        """Whether `sample(spec)` can be answered now."""

    def wait(self) -> Wait:
        """The condition for the first update beyond a whole batch of records; the printed plan counts updates by it."""
        return Wait()

    @abstractmethod
    def sample(self, spec: BatchSpec) -> Batch: ...

    def update(self, indices: Tensor | np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        """Write fields of stored records anew (latents, priorities, re-analysed targets); gone ids are skipped."""
        raise NotImplementedError(f"{type(self).__name__} does not store fields that can be updated")

    def scan(self, *, start: int, count: int, fields: Sequence[str]) -> RecordScan:
        """Every record once, a stretch at a time: `count` records from number `start` of all that are held on."""
        raise NotImplementedError(f"{type(self).__name__} cannot be read from end to end")

    @abstractmethod
    def __len__(self) -> int:
        """Records held now."""

    def describe(self) -> list[str]:
        """Lines of the printed plan about the data that are there already."""
        return []

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that the source will need when full: keys `ram`, `gpu`, `disk`."""

    @abstractmethod
    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Plain values and tensors; large arrays are written into `folder` (a part of the checkpoint being made)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None: ...

    def load_shares(self, shares: Sequence[tuple[dict[str, Any], Path]], own: slice) -> None:
        """Take over what other ranks than those of now saved (`state_dict` and folder of each): this one has the
        environments `own` of all."""
        raise CheckpointError(
            f"{type(self).__name__} cannot be dealt out to {ranks.count()} ranks: resume the run with "
            f"training.devices={len(shares)}."
        )

    def committed(self) -> None:  # noqa: B027
        """Told after the checkpoint that holds the last `state_dict` is safely on disk."""

    def close(self) -> None:  # noqa: B027
        """Release files and threads."""

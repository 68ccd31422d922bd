"""Batches that are drawn from several sources, in shares that may change over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.data_sources.base import DataSource, SourceContext
from rl_lab.errors import CheckpointError, ConfigError, DataError, nearest
from rl_lab.records import BatchSpec, RecordBlock, SequenceBatch, VectorStep

SCHEDULE_KEYS = ("from", "to", "over_batches", "over_records")
SEQUENCE_FIELDS = ("action", "reward", "is_first", "is_last", "is_terminal")


class Schedule:
    """A weight that stays, or goes linearly from one value to another while batches are drawn or records come in."""

    def __init__(self, name: str, value: Any) -> None:
        place = f"parts.{name}"
        if isinstance(value, Mapping):
            for key in value:
                if key not in SCHEDULE_KEYS:
                    raise ConfigError(f"{place}.{key} is not a key of a schedule.{nearest(str(key), SCHEDULE_KEYS)}")
            spans = [key for key in ("over_batches", "over_records") if key in value]
            if "from" not in value or "to" not in value or len(spans) != 1:
                raise ConfigError(f"{place}: expected {{from: 1.0, to: 0.1, over_batches: 10_000}}, or over_records.")
            self.start, self.end, self.span = value["from"], value["to"], value[spans[0]]
            self.counts_records = spans[0] == "over_records"
        else:
            self.start = self.end = value
            self.span, self.counts_records = 1, False
        for number in (self.start, self.end):
            if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
                raise ConfigError(f"{place} is {number!r}: a weight is a number from 0.")
        if self.span < 1:
            raise ConfigError(f"{place}: the schedule's span is {self.span}, expected at least 1.")

    def at(self, batches: int, records: int) -> float:
        share = min(1.0, (records if self.counts_records else batches) / self.span)
        return float(self.start + share * (self.end - self.start))


class MixtureSource(DataSource):
    """Each part gives a batch the share of sequences that its weight says; fractions are carried over to later ones.

    `parts` names other sources of the run: {demos: 0.5, replay: 0.5}, or a schedule in a weight's place: {from: 1.0,
    to: 0.1, over_records: 50_000}. Records that are collected go to the one part that takes them. A batch is ready when
    every part with a weight is. The parts prepare, save and count themselves.
    """

    def __init__(self, *, parts: Mapping[str, Any]) -> None:
        if not parts:
            raise ConfigError("parts is empty: name at least one data source with its weight.")
        self._schedules = {name: Schedule(name, value) for name, value in parts.items()}
        if not any(schedule.start > 0 or schedule.end > 0 for schedule in self._schedules.values()):
            raise ConfigError(f"parts: every weight is 0 ({', '.join(parts)}). Give at least one a weight above 0.")

    @staticmethod
    def parts_of(node: Mapping[str, Any]) -> list[str]:
        """The sources that a configuration of this kind draws from."""
        return list(node.get("parts") or {})

    def prepare(self, context: SourceContext) -> None:
        for name in self._schedules:
            if name not in context.sources:
                others = [other for other, source in context.sources.items() if source is not self]
                raise ConfigError(f"parts.{name}: there is no such data source.{nearest(name, others)}")
            if context.sources[name] is self:
                raise ConfigError(f"parts.{name}: a mixture cannot be a part of itself.")
        self._parts = {name: context.sources[name] for name in self._schedules}
        takers = [source for source in self._parts.values() if source.takes_records]
        self._taker = takers[0] if len(takers) == 1 else None
        self._batches = self._records = 0
        self._owed = np.zeros(len(self._parts))

    # Filling ----------------------------------------------------------------------------------------------------------

    def add(self, block: RecordBlock) -> None:
        if self._taker is None:
            takers = [name for name, source in self._parts.items() if source.takes_records]
            raise DataError(
                f"The mixture has {len(takers)} parts that take records ({', '.join(takers) or 'none'}): expected one. "
                "Let the phase collect into one of them by its own name."
            )
        self._taker.add(block)
        self._records += len(next(iter(block.fields.values())))

    def follow(self, step: VectorStep) -> None:
        if self._taker is not None:
            self._taker.follow(step)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    def memory(self) -> dict[str, int]:
        return {"ram": 0, "gpu": 0, "disk": 0}

    # Sampling ---------------------------------------------------------------------------------------------------------

    def weights(self) -> np.ndarray:
        """The share of each part now; they sum to 1."""
        values = np.array([schedule.at(self._batches, self._records) for schedule in self._schedules.values()])
        if not values.sum() > 0.0:
            raise DataError("All weights of the mixture have become 0. Let one of the schedules end above 0.")
        return values / values.sum()

    def check(self, spec: BatchSpec) -> None:
        for name, part in self._parts.items():
            try:
                part.check(spec)
            except DataError as error:
                raise DataError(f"parts.{name}: {error}") from error

    def ready(self, spec: BatchSpec) -> bool:
        shares = zip(self._parts.values(), self.weights().tolist(), strict=True)
        return all(part.ready(_part_of(spec, weight)) for part, weight in shares if weight > 0.0)

    def sample(self, spec: BatchSpec) -> SequenceBatch:
        counts = self._counts(spec.batch_size)
        self._batches += 1
        drawn = []
        for number, (part, count) in enumerate(zip(self._parts.values(), counts.tolist(), strict=True)):
            if count:
                batch = part.sample(spec._replace(batch_size=count))
                assert isinstance(batch, SequenceBatch)
                drawn.append((number, batch))
        return self._joined(drawn)

    def _counts(self, size: int) -> np.ndarray:
        """Sequences of each part in the next batch: what they are owed, in whole numbers, the largest rest first."""
        self._owed += self.weights() * size
        counts = np.floor(np.maximum(self._owed, 0.0) + 1e-9).astype(int)
        while counts.sum() < size:
            counts[(self._owed - counts).argmax()] += 1
        while counts.sum() > size:
            counts[np.where(counts > 0, self._owed - counts, np.inf).argmin()] -= 1
        self._owed -= counts
        return counts

    def _joined(self, drawn: Sequence[tuple[int, SequenceBatch]]) -> SequenceBatch:
        batches = [batch for _, batch in drawn]
        observation = self._joined_fields([batch.observation for batch in batches], "observation")
        extras = self._joined_fields([batch.extras for batch in batches], "field")
        plain = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in SEQUENCE_FIELDS}
        weight, indices = None, None
        if any(batch.weight is not None for batch in batches):
            weight = torch.cat([torch.ones_like(b.reward[:, 0]) if b.weight is None else b.weight for b in batches])
        ids = [(number, batch.indices) for number, batch in drawn if batch.indices is not None]
        if len(ids) == len(drawn):
            # The part is the remainder of an id, so that write-backs find it.
            indices = torch.cat([own * len(self._parts) + number for number, own in ids])
        return SequenceBatch(observation=observation, extras=extras, indices=indices, weight=weight, **plain)

    def _joined_fields(self, parts: Sequence[Mapping[str, Tensor]], kind: str) -> dict[str, Tensor]:
        names = parts[0].keys()
        for part in parts[1:]:
            if part.keys() != names:
                odd = sorted(names ^ part.keys())
                raise DataError(f"The parts of the mixture differ: not all have the {kind} '{odd[0]}'.")
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    def update(self, indices: Tensor | np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        """Hand each row to the part that it came from."""
        ids = torch.as_tensor(indices).cpu()
        owner = ids % len(self._parts)
        owner = owner.reshape(len(ids), -1)[:, 0]
        for number, part in enumerate(self._parts.values()):
            rows = torch.nonzero(owner == number)[:, 0]
            if len(rows):
                own = {
                    name: torch.as_tensor(value)[rows.to(torch.as_tensor(value).device)]
                    for name, value in fields.items()
                }
                part.update(ids[rows] // len(self._parts), own)

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self, folder: Path) -> dict[str, Any]:
        owed = torch.from_numpy(self._owed.copy())
        return {"parts": list(self._parts), "batches": self._batches, "records": self._records, "owed": owed}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        if state["parts"] != list(self._parts):
            raise CheckpointError(
                f"The checkpoint's mixture has the parts {state['parts']}, this run's {list(self._parts)}."
            )
        self._batches, self._records = state["batches"], state["records"]
        self._owed = state["owed"].numpy().copy()

    def load_shares(self, shares: Sequence[tuple[dict[str, Any], Path]], own: slice) -> None:
        self.load_state_dict(*shares[0])


def _part_of(spec: BatchSpec, weight: float) -> BatchSpec:
    return spec._replace(batch_size=max(1, int(np.ceil(spec.batch_size * weight))))

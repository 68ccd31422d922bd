"""Data that were there before the run: datasets of any format, demonstrations of a scripted expert, earlier runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_lab import ranks
from rl_lab.buffers import capacity as room
from rl_lab.buffers.batches import BatchGatherer, GatheredBatch
from rl_lab.buffers.episode_windows import EpisodeWindows
from rl_lab.buffers.saving import load_rows, save_rows
from rl_lab.buffers.storage import HostStorage, row_bytes
from rl_lab.buffers.worker import OrderedWorker
from rl_lab.data_sources.base import DataSource, SourceContext
from rl_lab.data_sources.replay import STANDARD_FIELDS
from rl_lab.datasets.episode import MissingLast
from rl_lab.datasets.files import open_dataset
from rl_lab.datasets.formats.base import ReadOptions
from rl_lab.datasets.importing import ActionUnits
from rl_lab.datasets.loading import UNLIMITED, load_records
from rl_lab.datasets.statistics import FieldStatistics
from rl_lab.errors import CheckpointError, ConfigError, DataError, nearest
from rl_lab.experts.demonstrations import Demonstrations
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    RecordBlock,
    RecordScan,
    SequenceBatch,
    split_observation,
)

SEED_DOMAIN = 8  # keeps this random stream apart from the run's other ones


class Pending(NamedTuple):
    """A batch that is being gathered for later."""

    rows: np.ndarray
    gathered: Future[GatheredBatch]
    before: Mapping[str, Any]  # the random state from which it was drawn


class OfflineSource(DataSource):
    """Windows of recorded episodes, drawn uniformly over all of them; none crosses an episode's end.

    The dataset is a file or folder (`path`, or several), or demonstrations that an expert plays before the run starts
    (`expert`); those are kept in the run's own folder. Each kind of batch (`BatchSpec`) has a random stream of its own,
    so that the batches of one do not depend on who else draws. `SequenceBatch.indices` are row numbers.

    `statistics` has mean, deviation and limits of every field, for normalisers. They are saved with the run.
    """

    prefilled: ClassVar[bool] = True
    takes_records: ClassVar[bool] = False

    def __init__(
        self,
        *,
        path: str | Sequence[str] | None = None,
        expert: Mapping[str, Any] | None = None,  # {name: cartpole, episodes: 100, seed: 0, noise: 0}
        format: str = "auto",  # see rl_lab.datasets.files
        mapping: Mapping[str, str] | None = None,  # role → the file's own name, where the usual names do not do
        alignment: Literal["auto", "after", "before"] = "auto",  # before: actions led to their observation
        action_units: ActionUnits = "auto",  # environment: its own; agent: [-1, 1]
        missing_last: MissingLast = "auto",  # where the observation after the last action was not kept
        episodes: int | Sequence[int] | None = None,  # the first n, or those of [from, to)
        windows: Literal["episode", "stream"] = "episode",  # stream: across their ends, as in replay
        records: Literal["all", "decisions"] = "all",  # decisions: without the last record of each episode
        short_episodes: Literal["error", "skip"] = "error",  # than a window
        pad_before: int = 0,  # records that a window may begin before its episode; the first one is repeated there
        pad_after: int = 0,
        memory: Literal["auto", "ram", "disk"] = "auto",  # auto: what exceeds half of the free memory stays on disk
        prefetch: bool | Literal["auto"] = "auto",  # auto: where the learner is on a GPU
        seed: int = 0,  # varies the draws without changing the run's seed
    ) -> None:
        if (path is None) == (expert is None):
            raise ConfigError("Give path (a dataset) or expert (its demonstrations are then recorded): one of the two.")
        if windows == "stream" and (pad_before or pad_after or records == "decisions"):
            raise ConfigError("windows=stream takes no padding and all records: those belong to windows=episode.")
        self._paths = [] if path is None else [path] if isinstance(path, str) else list(path)
        self._demonstrations = None if expert is None else Demonstrations(**expert)
        self._format, self._options = format, ReadOptions(dict(mapping or {}), alignment)
        self._importing = {"action_units": action_units, "missing_last": missing_last}
        self._range = _episode_range(episodes)
        self._windows_kind, self._records, self._short = windows, records, short_episodes
        self._pad_before, self._pad_after, self._memory = pad_before, pad_after, memory
        self._prefetch, self._seed = prefetch, seed

    # Taking in --------------------------------------------------------------------------------------------------------

    def prepare(self, context: SourceContext) -> None:
        self._context, self._worker = context, OrderedWorker()
        paths: list[str | Path] = list(self._paths)
        if self._demonstrations is not None:
            paths = [self._demonstrations.recorded_in(context)]
        readers = [open_dataset(path, format_name=self._format, options=self._options) for path in paths]
        try:
            self._storage, self.statistics, self.report = load_records(
                readers, fields=context.fields, actions=context.actions, settings=self._importing, episodes=self._range,
                budget={"ram": UNLIMITED, "disk": 0, "auto": room.available_ram() // 2}[self._memory],
                folder=context.folder / "records",
            )  # fmt: skip
        finally:
            for reader in readers:
                reader.close()
        first = np.flatnonzero(self._storage.arrays["is_first"])
        self._starts = first.astype(np.int64)
        self._lengths = np.diff(np.append(first, self._storage.rows)).astype(np.int64)
        self._gatherer = BatchGatherer(self._storage)
        self._extras = self._extra_fields(context)
        self._windows: dict[int, EpisodeWindows] = {}  # by length
        self._rngs: dict[BatchSpec, np.random.Generator] = {}
        self._pending: dict[BatchSpec, Pending] = {}

    def _extra_fields(self, context: SourceContext) -> HostStorage | None:
        """Fields that a workflow stores with its records (latents, say): zeros until it writes them."""
        own = {
            name: spec
            for name, spec in context.fields.items()
            if name not in STANDARD_FIELDS and not name.startswith(OBSERVATION_PREFIX)
        }
        return HostStorage(own, self._storage.rows) if own else None

    def add(self, block: RecordBlock) -> None:
        raise DataError("An offline source takes no records: let the phase collect into another data_source.")

    def __len__(self) -> int:
        return self._storage.rows

    @property
    def episodes(self) -> int:
        return len(self._starts)

    def memory(self) -> dict[str, int]:
        extras = sum(row_bytes(spec) for spec in self._extras.fields.values()) * len(self) if self._extras else 0
        return {"ram": self._storage.resident_bytes() + extras, "gpu": 0, "disk": 0}

    def describe(self) -> list[str]:
        size = (self._storage.resident_bytes() + self._storage.file_bytes()) / 2**20
        where = "read from files" if self._storage.file_bytes() else "in memory"
        decisions = len(self) - self.episodes
        lines = [f"{self.episodes:,} episodes, {decisions:,} decisions, {size:.1f} MiB {where}"]
        return lines + ([] if self.report.rewarded else ["no rewards"]) + self.report.notes

    # Sampling ---------------------------------------------------------------------------------------------------------

    def check(self, spec: BatchSpec) -> None:
        self._field_names(spec)
        windows = self._windows_of(spec)
        longest = int(self._lengths.max())
        short = int((self._lengths - (self._records == "decisions") + self._padding < spec.window).sum())
        if not len(windows):
            raise DataError(
                f"A batch needs windows of {spec.window} records, and the longest of {self.episodes} episodes has "
                f"{longest}. Use shorter sequences (workflow.sequence_length), or windows=stream, whose windows cross "
                "the ends of episodes as those of the replay do."
            )
        if short and self._windows_kind == "episode" and self._short == "error":
            raise DataError(
                f"{short} of {self.episodes} episodes have fewer records than a window, {spec.window}. Leave them out "
                "with short_episodes=skip, or use windows=stream, whose windows cross the ends of episodes."
            )

    @property
    def _padding(self) -> int:
        return self._pad_before + self._pad_after

    def ready(self, spec: BatchSpec) -> bool:
        return len(self._windows_of(spec)) > 0

    def sample(self, spec: BatchSpec) -> SequenceBatch:
        names = self._field_names(spec)
        pending = self._pending.pop(spec, None)
        if pending is None:
            rows = self._draw(spec)
            gathered = self._gatherer.gather(rows, names, spec.device)
        else:
            rows, gathered = pending.rows, pending.gathered.result()
        tensors = gathered.hand_over()
        if self._prefetch is True or (self._prefetch == "auto" and spec.device.startswith("cuda")):
            self._worker.start_thread()
            before = self._rng(spec).bit_generator.state
            following = self._draw(spec)
            job = self._worker.submit(lambda: self._gatherer.gather(following, names, spec.device))
            self._pending[spec] = Pending(following, job, before)
        return self._assemble(tensors, rows, spec)

    def _assemble(self, values: Mapping[str, Any], rows: np.ndarray, spec: BatchSpec) -> SequenceBatch:
        observation, rest = split_observation(values)
        extras: dict[str, Any] = {}
        if self._extras is not None:
            for name, field in self._extras.fields.items():
                if spec.fields is None or name in spec.fields:
                    out = np.empty((*rows.shape, *field.shape), field.dtype)
                    self._extras.gather(name, rows, out)
                    extras[name] = torch.from_numpy(out).to(spec.device)
        return SequenceBatch(observation=observation, extras=extras, indices=torch.from_numpy(rows), **rest)

    def _draw(self, spec: BatchSpec) -> np.ndarray:
        return self._windows_of(spec).draw(self._rng(spec), spec.batch_size)

    def _rng(self, spec: BatchSpec) -> np.random.Generator:
        if spec not in self._rngs:
            seeds = [self._context.seed, SEED_DOMAIN, self._seed, spec.batch_size, spec.sequence_length, spec.context]
            self._rngs[spec] = np.random.default_rng(np.random.SeedSequence(seeds))
        return self._rngs[spec]

    def _windows_of(self, spec: BatchSpec) -> EpisodeWindows:
        if spec.window not in self._windows:
            starts, lengths = self._starts, self._lengths - (self._records == "decisions")
            if self._windows_kind == "stream":
                starts, lengths = np.zeros(1, np.int64), np.array([len(self)])
            self._windows[spec.window] = EpisodeWindows(
                starts, lengths, window=spec.window, pad_before=self._pad_before, pad_after=self._pad_after
            )
        return self._windows[spec.window]

    def _field_names(self, spec: BatchSpec) -> list[str]:
        stored = self._storage.fields
        known = [*stored, *(self._extras.fields if self._extras else ())]
        for name in spec.fields or ():
            if name not in known:
                raise DataError(f"The dataset has no field '{name}', which batches need.{nearest(name, known)}")
        if not self.report.rewarded and (spec.fields is None or "reward" in spec.fields):
            raise DataError(
                "The dataset has no field 'reward', and this workflow learns from rewards. Use data with rewards, or "
                "name the column: mapping: {reward: NAME}."
            )
        if spec.fields is None:
            return list(stored)
        return [name for name in stored if name in spec.fields or name in STANDARD_FIELDS]

    def scan(self, *, start: int, count: int, fields: Sequence[str]) -> RecordScan:
        rows = np.arange(start, min(start + count, len(self)))
        values = {}
        for name in fields:
            storage = self._extras if self._extras is not None and name in self._extras.fields else self._storage
            spec = storage.fields[name]
            values[name] = np.empty((len(rows), *spec.shape), spec.dtype)
            if len(rows):
                storage.gather(name, rows[None], values[name][None])
        return RecordScan(rows, values)

    def update(self, indices: Tensor | np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        """Write fields that the workflow stores with records; the dataset itself does not change."""
        rows = (indices.cpu().numpy() if isinstance(indices, Tensor) else indices).reshape(-1)
        for name, value in fields.items():
            if self._extras is None or name not in self._extras.fields:
                raise DataError(f"update: '{name}' is not a field that this workflow adds to its records.")
            flat = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(value)
            self._extras.write(name, rows, flat.reshape(len(rows), *self._extras.fields[name].shape).float())

    # Saving -----------------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, int]:
        """Sizes that distinguish this dataset from others; a resumed run checks them."""
        return {"records": len(self), "episodes": self.episodes, "lengths": int((self._lengths**2).sum())}

    def state_dict(self, folder: Path) -> dict[str, Any]:
        self._worker.drain()
        random = {}
        for spec, rng in self._rngs.items():
            pending = self._pending.get(spec)
            random[json.dumps(list(spec))] = json.dumps(rng.bit_generator.state if pending is None else pending.before)
        if self._extras is not None:
            save_rows(self._extras, np.array([len(self)]), folder)
        statistics = {name: value.state_dict() for name, value in (self.statistics or {}).items()}
        return {"identity": self._identity(), "random": random, "statistics": statistics}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        if state["identity"] != self._identity():
            raise CheckpointError(
                f"The dataset is not the one that the run began with: it has {self._identity()}, then it had "
                f"{state['identity']}. Put the old one back at its path."
            )
        self._worker.drain()
        self._pending.clear()
        self._rngs.clear()
        for text, random in state["random"].items():
            self._rng(BatchSpec.from_list(json.loads(text))).bit_generator.state = json.loads(random)
        self.statistics = {name: FieldStatistics.from_state(value) for name, value in state["statistics"].items()}
        if self._extras is not None:
            load_rows(self._extras, np.array([len(self)]), folder)

    def load_shares(self, shares: Sequence[tuple[dict[str, Any], Path]], own: slice) -> None:
        """Every rank has the whole dataset, and draws of its own."""
        new = ranks.rank() >= len(shares)
        self.load_state_dict(*shares[0 if new else ranks.rank()])
        if new:
            self._rngs.clear()

    def close(self) -> None:
        if hasattr(self, "_storage"):
            self._worker.close()
            self._storage.close()


def _episode_range(episodes: int | Sequence[int] | None) -> tuple[int, int | None]:
    if episodes is None:
        return 0, None
    if isinstance(episodes, int):
        if episodes < 1:
            raise ConfigError(f"episodes={episodes}: expected at least 1, or null for all.")
        return 0, episodes
    if len(episodes) != 2 or not 0 <= episodes[0] < episodes[1]:
        raise ConfigError(f"episodes={list(episodes)}: expected a number, or [from, to) with from below to.")
    return episodes[0], episodes[1]

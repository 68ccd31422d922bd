"""Replay of sequences: a ring buffer in RAM, on disk or on the GPU, sampled in windows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_lab import ranks
from rl_lab.buffers import capacity as room
from rl_lab.buffers.ahead import MOST_BYTES, DrawnAhead
from rl_lab.buffers.batches import BatchGatherer, GatheredBatch
from rl_lab.buffers.disk import DiskStorage
from rl_lab.buffers.priorities import PrioritySampler
from rl_lab.buffers.ring import SequenceRing
from rl_lab.buffers.saving import load_rows, load_streams, save_rows
from rl_lab.buffers.storage import DeviceStorage, HostStorage, Storage, row_bytes, upload
from rl_lab.buffers.worker import OrderedWorker
from rl_lab.data_sources.base import DataSource, SourceContext, Wait
from rl_lab.errors import CheckpointError, ConfigError, DataError, nearest
from rl_lab.records import OBSERVATION_PREFIX, BatchSpec, RecordBlock, RecordScan, SequenceBatch

STANDARD_FIELDS = ("action", "reward", "is_first", "is_last", "is_terminal")
PRIORITY = "priority"  # the name under which `update` takes priorities
SEED_DOMAIN = 2  # keeps this random stream apart from the run's other ones


class Drawn(NamedTuple):
    """Windows that were chosen."""

    ids: np.ndarray  # [batch, time]
    weight: Tensor | None  # [batch], where they were drawn by priority
    gather: Callable[[], GatheredBatch]


class Pending(NamedTuple):
    """A batch that is being gathered for later."""

    ids: np.ndarray
    weight: Tensor | None
    gathered: Future[GatheredBatch]


class Plan(NamedTuple):
    """The layout of one kind of batch."""

    names: list[str]  # of the fields
    observation: dict[str, str]  # key → field
    extras: list[str]
    draws_ahead: bool


class SequenceReplay(DataSource):
    """Replay of windows, which cross episode boundaries but never leave one environment's stream.

    They are drawn uniformly or by priority. The priority of a window is that of the record it is trained on, its first
    one after the context; `update(indices, {"priority": …})` sets it, and `SequenceBatch.weight` makes up for the
    uneven draws.

    A batch on the CPU is the caller's for as long as it holds any tensor of it; its memory is used again after that.
    `SequenceBatch.indices` stays on the CPU. With prefetch, the next batch is drawn when one is handed out, and
    gathered in the background; additions and write-backs of the time between take effect after it, in the order of the
    calls, so that the batches do not depend on timing. Small uniform batches for the CPU are drawn several at once
    (see `DrawnAhead`).
    """

    def __init__(
        self,
        *,
        capacity: int,  # records, over all environments
        storage: Literal["ram", "disk", "gpu", "auto"] = "ram",  # auto: gpu where the run is on one, else ram
        sampling: Literal["uniform", "prioritized"] = "uniform",
        online_queue: bool = True,  # uniform: serve each new stretch of experience once before anything else
        alpha: float = 0.6,  # prioritized: how much priorities matter; 0: not at all
        beta: float = 0.4,  # prioritized: how much of the bias the weights take back at first …
        beta_final: float = 1.0,  # … and in the end
        beta_records: int = 1_000_000,  # prioritized: records until then; between them β rises linearly
        prefetch: bool | Literal["auto"] = "auto",  # auto: where the learner is on a GPU and the records are not
        start_after: int = 0,  # records that must be there before the first batch; at least one batch of windows always
        seed: int = 0,  # varies the draws without changing the run's seed
        keep_checkpoints: int = 2,  # disk: how many of the last checkpoints can be gone back to
    ) -> None:
        if storage not in ("ram", "disk", "gpu", "auto"):
            raise ConfigError(f"data_sources.replay.storage={storage!r}: expected ram, disk, gpu or auto.")
        if sampling not in ("uniform", "prioritized"):
            raise ConfigError(f"data_sources.replay.sampling={sampling!r}: expected uniform or prioritized.")
        if alpha < 0.0 or not (0.0 <= beta <= 1.0 and 0.0 <= beta_final <= 1.0):
            raise ConfigError(
                f"data_sources.replay: alpha={alpha}, beta={beta}, beta_final={beta_final}: expected alpha of at least "
                "0, and beta and beta_final from 0 to 1."
            )
        if prefetch not in ("auto", True, False):
            raise ConfigError(f"data_sources.replay.prefetch={prefetch!r}: expected auto, true or false.")
        if capacity < 1 or start_after > capacity:
            raise ConfigError(
                f"data_sources.replay: capacity={capacity}, start_after={start_after}: expected a capacity of at least "
                "1 and a start_after within it."
            )
        self._capacity, self._storage_kind, self._online = int(capacity), storage, online_queue
        self._prefetch, self._start_after, self._seed = prefetch, start_after, seed
        self._keep_checkpoints, self._sampling, self._alpha = keep_checkpoints, sampling, alpha
        self._beta, self._beta_final, self._beta_records = beta, beta_final, beta_records

    # Filling ----------------------------------------------------------------------------------------------------------

    def prepare(self, context: SourceContext) -> None:
        missing = [name for name in STANDARD_FIELDS if name not in context.fields]
        if missing:
            raise DataError(f"The replay needs these fields in every record, and they are not declared: {missing}.")
        self._context = context
        length = self._capacity // context.num_envs
        if length < 2:
            raise DataError(
                f"data_sources.replay.capacity={self._capacity} leaves {length} records for each of {context.num_envs} "
                f"environments. Set it to at least {2 * context.num_envs}."
            )
        if self._storage_kind == "auto":
            self._storage_kind = "gpu" if torch.device(context.device).type == "cuda" else "ram"
        self._record_bytes = sum(row_bytes(spec) for spec in context.fields.values())
        self._worker = OrderedWorker()
        storage = self._make_storage(context, length * context.num_envs)
        self._ring = SequenceRing(storage=storage, num_envs=context.num_envs, worker=self._worker)
        self._gatherer = BatchGatherer(storage)
        prioritized = self._sampling == "prioritized"
        self._priorities = PrioritySampler(self._ring.index, alpha=self._alpha) if prioritized else None
        self._rng = np.random.default_rng(np.random.SeedSequence([context.seed, SEED_DOMAIN, self._seed]))
        self._pending: dict[BatchSpec, Pending] = {}
        self._last_spec: BatchSpec | None = None
        self._ready_for: set[BatchSpec] = set()
        self._plans: dict[BatchSpec, Plan] = {}
        self._ahead = DrawnAhead(self._ring.index, self._gather_now)

    def _make_storage(self, context: SourceContext, rows: int) -> Storage:
        needed, capacity, each = rows * self._record_bytes, self._capacity, self._record_bytes
        if self._storage_kind == "gpu":
            if torch.device(context.device).type != "cuda":
                raise DataError(
                    f"data_sources.replay.storage=gpu needs a run on the GPU, and this one is on {context.device}. "
                    "Set storage to ram or disk, or experiment.device to cuda."
                )
            free, other = room.available_gpu(context.device), ", or set data_sources.replay.storage to ram or disk"
            room.require(needed, free, what="GPU memory", capacity=capacity, bytes_per_record=each, other=other)
            return DeviceStorage(context.fields, rows, context.device)
        if self._storage_kind == "disk":
            return DiskStorage(
                context.fields, rows, context.folder, num_envs=context.num_envs, keep_checkpoints=self._keep_checkpoints
            )
        free, other = room.available_ram(), ", or set data_sources.replay.storage to disk"
        room.require(needed, free, what="RAM", capacity=capacity, bytes_per_record=each, other=other)
        return HostStorage(context.fields, rows)

    def add(self, block: RecordBlock) -> None:
        self._ring.add(block)
        self._ahead.records_changed()

    def __len__(self) -> int:
        self._ring.flush()
        return int(self._ring.index.held().sum())

    def memory(self) -> dict[str, int]:
        needed = self._ring.storage.rows * self._record_bytes
        memory = {kind: needed if kind == self._storage_kind else 0 for kind in ("ram", "gpu", "disk")}
        if self._priorities is not None:
            memory["ram"] += self._priorities.memory()
        return memory

    # Sampling ---------------------------------------------------------------------------------------------------------

    def ready(self, spec: BatchSpec) -> bool:
        if spec in self._ready_for:  # windows only become more
            return True
        self._check_window(spec)
        records = len(self)
        windows = int(self._ring.index.window_counts(spec.window).sum())
        if records < self._start_after or windows < spec.batch_size:
            return False
        self._ready_for.add(spec)
        return True

    def wait(self) -> Wait:
        return Wait(self._start_after)

    def sample(self, spec: BatchSpec) -> SequenceBatch:
        self._ring.flush()
        plan = self._plan(spec)
        if plan.draws_ahead:
            self._check_drawable(spec)
            ids, values = self._ahead.take(spec, plan.names, self._rng)
            tensors = {name: torch.from_numpy(value) for name, value in values.items()}
            return _assemble(plan, tensors, torch.from_numpy(ids), None)
        pending = self._pending.pop(spec, None)
        if pending is None:
            ids, weight, gather = self._draw(spec)
            gathered = self._worker.call(gather)
        else:
            ids, weight, gathered = pending.ids, pending.weight, pending.gathered.result()
        tensors = gathered.hand_over()
        # A spec that is asked for only once, for a picture say, is not worth a second batch.
        if self._prefetches(spec) and (pending is not None or spec == self._last_spec):
            self._worker.start_thread()
            following = self._draw(spec)
            self._pending[spec] = Pending(following.ids, following.weight, self._worker.submit(following.gather))
        self._last_spec = spec
        return _assemble(plan, tensors, torch.from_numpy(ids), weight)

    def _gather_now(self, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        return self._worker.call(partial(self._gatherer.gather_arrays, rows, names))

    def _plan(self, spec: BatchSpec) -> Plan:
        if (plan := self._plans.get(spec)) is None:
            self._check_window(spec)
            names = self._field_names(spec)
            start = len(OBSERVATION_PREFIX)
            observation = {name[start:]: name for name in names if name.startswith(OBSERVATION_PREFIX)}
            extras = [name for name in names if name not in STANDARD_FIELDS and name not in observation.values()]
            uniform = self._priorities is None and not self._online
            on_host = self._storage_kind != "gpu" and spec.device == "cpu" and not self._prefetches(spec)
            small = spec.batch_size * spec.window * self._record_bytes <= MOST_BYTES
            plan = self._plans[spec] = Plan(names, observation, extras, uniform and on_host and small)
        return plan

    def _check_drawable(self, spec: BatchSpec) -> None:
        if spec not in self._ready_for and not self._ring.index.window_counts(spec.window).any():
            raise DataError(
                f"The replay holds {len(self)} records and no window of {spec.window} yet. Collect at least that many "
                "records in one environment before the first update (ready() tells)."
            )

    def _draw(self, spec: BatchSpec) -> Drawn:
        """Choose windows now: their record ids, and the job that gathers them."""
        self._check_drawable(spec)
        index, weight = self._ring.index, None
        if self._priorities is None:
            windows = index.draw(self._rng, count=spec.batch_size, window=spec.window, online=self._online)
        else:
            windows, weights = self._priorities.draw(
                self._rng, count=spec.batch_size, context=spec.context, length=spec.sequence_length, beta=self.beta
            )
            weight = upload(weights, spec.device)
        return Drawn(
            windows.ids, weight, partial(self._gatherer.gather, windows.rows, self._plan(spec).names, spec.device)
        )

    @property
    def beta(self) -> float:
        """The exponent β of importance weights now: 1 takes back all of the bias of uneven draws."""
        share = min(1.0, int(self._ring.index.written.sum()) / max(1, self._beta_records))
        return self._beta + share * (self._beta_final - self._beta)

    def _field_names(self, spec: BatchSpec) -> list[str]:
        stored = self._context.fields
        if spec.fields is None:
            return list(stored)
        for name in spec.fields:
            if name not in stored:
                raise DataError(f"BatchSpec.fields: the replay stores no field '{name}'.{nearest(name, stored)}")
        return [name for name in stored if name in spec.fields or name in STANDARD_FIELDS]

    def _check_window(self, spec: BatchSpec) -> None:
        length, envs = self._ring.index.length, self._context.num_envs
        if spec.window > length:
            raise DataError(
                f"data_sources.replay.capacity={self._capacity} keeps {length} records of each of {envs} environments, "
                f"and a batch needs {spec.window} consecutive ones. Set it to at least {spec.window * envs}."
            )

    def _prefetches(self, spec: BatchSpec) -> bool:
        if self._storage_kind == "gpu":
            return False
        return spec.device.startswith("cuda") if self._prefetch == "auto" else bool(self._prefetch)

    def update(self, indices: Tensor | np.ndarray, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        ids = indices.cpu().numpy() if isinstance(indices, Tensor) else indices
        if self._priorities is not None and PRIORITY in fields:
            self._ring.flush()  # when a record counts as new must not depend on what happens to be staged
            self._update_priorities(ids, fields[PRIORITY])
            fields = {name: value for name, value in fields.items() if name != PRIORITY}
        if fields:
            self._ring.update(ids, fields)
            self._ahead.records_changed()

    def scan(self, *, start: int, count: int, fields: Sequence[str]) -> RecordScan:
        self._ring.flush()
        self._worker.drain()
        ids = self._ring.index.stretch(start, count)
        _, rows = self._ring.index.locate(ids)
        storage = self._ring.storage
        if isinstance(storage, DeviceStorage):
            on_device = upload(rows, storage.device)
            return RecordScan(ids, {name: storage.gather(name, on_device).cpu().numpy() for name in fields})
        assert isinstance(storage, HostStorage)
        return RecordScan(ids, {name: storage.arrays[name][rows] for name in fields})

    def _update_priorities(self, ids: np.ndarray, value: Tensor | np.ndarray) -> None:
        if tuple(value.shape) != ids.shape:
            raise DataError(
                f"update: '{PRIORITY}' has shape {tuple(value.shape)}, expected that of the indices, {ids.shape}: one "
                "number for each record."
            )
        assert self._priorities is not None
        self._priorities.update(ids, value.detach().cpu().numpy() if isinstance(value, Tensor) else value)

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self, folder: Path) -> dict[str, Any]:
        self._ring.flush()
        self._worker.drain()
        storage = self._ring.storage
        state: dict[str, Any] = {
            "storage": self._storage_kind,
            "sampling": self._sampling,
            "num_envs": self._context.num_envs,
            "length": self._ring.index.length,
            "streams": self._ring.state_dict(),
            "rng": json.dumps(self._rng.bit_generator.state),
            "last_spec": None if self._last_spec is None else list(self._last_spec),
            "ahead": self._ahead.state_dict(),
            "pending": [
                {
                    "spec": list(spec),
                    "ids": torch.from_numpy(pending.ids),
                    "weight": None if pending.weight is None else pending.weight.cpu(),
                    "tensors": {name: tensor.cpu() for name, tensor in pending.gathered.result().hand_over().items()},
                }
                for spec, pending in self._pending.items()
            ],
            "priorities": None if self._priorities is None else self._priorities.state_dict(),
        }
        if isinstance(storage, DiskStorage):
            state["journal"] = storage.begin_checkpoint(self._ring.index.held())
        else:
            save_rows(storage, self._ring.index.held(), folder)
        return state

    def _require_same(self, state: Mapping[str, Any], **here: Any) -> None:
        if {state["storage"], self._storage_kind} == {"ram", "gpu"}:  # another device; they are saved alike
            del here["storage"]
        for name, value in here.items():
            if state[name] != value:
                raise CheckpointError(
                    f"The checkpoint's replay has {name}={state[name]}, this run's has {value}. Resume with the run's "
                    "own data_sources.replay and environment.num_envs."
                )

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        self._worker.drain()
        index = self._ring.index
        kinds = {"storage": self._storage_kind, "sampling": self._sampling}
        self._require_same(state, **kinds, num_envs=index.num_envs, length=index.length)
        self._ring.load_state_dict(state["streams"])
        if self._priorities is not None:
            self._priorities.load_state_dict(state["priorities"])
        self._rng.bit_generator.state = json.loads(state["rng"])
        self._last_spec = None if state["last_spec"] is None else BatchSpec.from_list(state["last_spec"])
        self._ready_for.clear()
        self._pending.clear()
        for entry in state["pending"]:
            spec = BatchSpec.from_list(entry["spec"])
            future: Future[GatheredBatch] = Future()
            future.set_result(GatheredBatch({name: value.to(spec.device) for name, value in entry["tensors"].items()}))
            weight = entry["weight"]
            self._pending[spec] = Pending(
                entry["ids"].numpy(), None if weight is None else weight.to(spec.device), future
            )
        storage = self._ring.storage
        if isinstance(storage, DiskStorage):
            storage.go_back(state["journal"], self._ring.index.held())
        else:
            load_rows(storage, self._ring.index.held(), folder)
        self._ahead.load_state_dict(state["ahead"])

    def load_shares(self, shares: Sequence[tuple[dict[str, Any], Path]], own: slice) -> None:
        """The records and priorities of this rank's environments. Batches that were drawn ahead are given up."""
        self._worker.drain()
        states, storage, length = [state for state, _ in shares], self._ring.storage, self._ring.index.length
        self._require_same(states[0], storage=self._storage_kind, sampling=self._sampling, length=length)
        if isinstance(storage, DiskStorage):  # refused before it was opened, too
            return super().load_shares(shares, own)
        streams = [state["streams"] for state in states]
        self._ring.load_state_dict(ranks.dealt(streams, own))
        if self._priorities is not None:
            saved = [state["priorities"] for state in states]
            masses = ranks.dealt([part["masses"].view(-1, length) for part in saved], own)
            known = ranks.dealt([part["known"] for part in saved], own)
            self._priorities.load_state_dict({"masses": masses.flatten(), "known": known})
        if ranks.rank() < len(shares):
            self._rng.bit_generator.state = json.loads(states[ranks.rank()]["rng"])
        self._last_spec = None
        self._ready_for.clear()
        self._pending.clear()
        self._ahead.clear()
        places = {number: place * length for place, number in enumerate(range(own.start, own.stop))}
        first = 0  # the number of the first environment of a share
        for state, (_, folder) in zip(streams, shares, strict=True):
            held = np.minimum(state["written"].numpy(), length)
            load_streams(storage, held, folder, [places.get(first + stream) for stream in range(len(held))])
            first += len(held)

    def committed(self) -> None:
        if isinstance(self._ring.storage, DiskStorage):
            self._ring.storage.checkpoint_committed()

    def close(self) -> None:
        if hasattr(self, "_ring"):
            self._worker.close()
            self._ring.storage.close()


def _assemble(plan: Plan, values: Mapping[str, Any], indices: Any, weight: Tensor | None) -> SequenceBatch:
    return SequenceBatch(
        observation={key: values[name] for key, name in plan.observation.items()},
        extras={name: values[name] for name in plan.extras},
        indices=indices,
        weight=weight,
        **{name: values[name] for name in STANDARD_FIELDS},
    )

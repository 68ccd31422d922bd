"""Batches of what a model imagines: short rollouts from states of another source, for any learner (MBPO)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rl_lab import ranks
from rl_lab.buffers.batches import BatchGatherer
from rl_lab.buffers.episode_windows import EpisodeWindows
from rl_lab.buffers.saving import load_rows, save_rows
from rl_lab.buffers.storage import HostStorage, row_bytes
from rl_lab.components.acting import AgentState
from rl_lab.components.actions import ActionCodec
from rl_lab.data_sources.base import DataSource, SourceContext
from rl_lab.errors import ConfigError, DataError, nearest
from rl_lab.records import OBSERVATION_PREFIX, BatchSpec, Fields, RecordBlock, SequenceBatch, split_observation
from rl_lab.simulation.simulator import Simulator

SEED_DOMAIN = 9  # keeps this random stream apart from the run's other ones


class ImaginedSource(DataSource):
    """Before every `every` batches, `rollouts` rollouts of `horizon` steps are imagined; batches are drawn from the
    newest `keep` times as many.

    They start from records of `source` and follow the agent as it explores (`policy: agent`), the model's own policy
    (`model`) or uniform actions (`random`), in `simulator`, or in the model that the workflow learns. A rollout begins
    with `is_first`, because whoever acts in it begins without memory, and ends with `is_last`: with `is_terminal` where
    the model ends the episode, drawn by its probability of going on, and without where the horizon does.
    """

    prefilled: ClassVar[bool] = True  # as far as its source is
    takes_records: ClassVar[bool] = False

    def __init__(
        self,
        *,
        source: str,
        horizon: int,
        rollouts: int,
        every: int,
        keep: int,
        policy: Literal["agent", "model", "random"],
        simulator: Simulator | None,  # "@components.simulator", say; None: the workflow's own model
        seed: int = 0,  # varies the draws without changing the run's seed
    ) -> None:
        for name, value in {"horizon": horizon, "rollouts": rollouts, "every": every, "keep": keep}.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: expected at least 1.")
        self._source_name, self._horizon, self._rollouts, self._every = source, horizon, rollouts, every
        self._keep, self._policy, self._given, self._seed = keep, policy, simulator, seed

    @staticmethod
    def parts_of(node: Mapping[str, Any]) -> list[str]:
        """The sources that a configuration of this kind draws from."""
        return [node["source"]] if node.get("source") else []

    def prepare(self, context: SourceContext) -> None:
        if self._source_name not in context.sources or context.sources[self._source_name] is self:
            others = [name for name, source in context.sources.items() if source is not self]
            raise ConfigError(
                f"source={self._source_name}: there is no such data source.{nearest(self._source_name, others)}"
            )
        assert context.actions is not None
        self._context, self._source = context, context.sources[self._source_name]
        self._codec = ActionCodec(context.actions.spec)
        self._fields = {
            name: spec
            for name, spec in context.fields.items()
            if name.startswith(OBSERVATION_PREFIX) or name in ("action", "reward", "is_first", "is_last", "is_terminal")
        }
        self._length = self._horizon + 1
        slots = self._rollouts * self._keep
        self._storage = HostStorage(self._fields, slots * self._length)
        self._gatherer = BatchGatherer(self._storage)
        self._valid = np.zeros(slots, np.int64)  # records of each rollout
        self._next = self._drawn = 0
        self._windows: dict[int, EpisodeWindows] = {}
        self._rng = np.random.default_rng(np.random.SeedSequence([context.seed, SEED_DOMAIN, self._seed]))

    def _simulator(self) -> Simulator:
        simulator = self._given
        if simulator is None:
            assert self._context.simulator is not None
            simulator = self._context.simulator.simulator
        if not simulator.has_observation:
            raise DataError(f"{type(simulator).__name__} predicts no observations, so nothing can be imagined in it.")
        if self._policy == "model" and not simulator.has_policy:
            raise DataError(f"policy=model: {type(simulator).__name__} has no policy. Use policy=agent.")
        return simulator

    def add(self, block: RecordBlock) -> None:
        raise DataError("An imagined source takes no records: let the phase collect into its source.")

    def __len__(self) -> int:
        return int(self._valid.sum())

    def memory(self) -> dict[str, int]:
        return {"ram": self._storage.rows * sum(map(row_bytes, self._fields.values())), "gpu": 0, "disk": 0}

    # Sampling ---------------------------------------------------------------------------------------------------------

    def check(self, spec: BatchSpec) -> None:
        self._simulator()
        if spec.window > self._length:
            raise DataError(
                f"A batch needs windows of {spec.window} records, and a rollout has {self._length}. Set horizon to at "
                f"least {spec.window - 1}."
            )
        for name in spec.fields or ():
            if name not in self._fields:
                raise DataError(f"An imagined record has no field '{name}', which batches need.")
        self._source.check(self._start_spec(spec.device))

    def ready(self, spec: BatchSpec) -> bool:
        return self._source.ready(self._start_spec(spec.device))

    def sample(self, spec: BatchSpec) -> SequenceBatch:
        if self._drawn % self._every == 0 or not len(self._windows_of(spec.window)):
            self._imagine(spec.device)
        self._drawn += 1
        windows = self._windows_of(spec.window)
        if not len(windows):
            raise DataError(f"Every imagined rollout ended before {spec.window} records: the model ends all episodes.")
        rows = windows.draw(self._rng, spec.batch_size)
        values = self._gatherer.gather(rows, list(self._fields), spec.device).hand_over()
        observation, rest = split_observation(values)
        return SequenceBatch(observation=observation, indices=None, **rest)

    def _start_spec(self, device: str) -> BatchSpec:
        return BatchSpec(self._rollouts, 1, device=device)

    def _windows_of(self, window: int) -> EpisodeWindows:
        if window not in self._windows:
            starts = np.arange(len(self._valid)) * self._length
            self._windows[window] = EpisodeWindows(starts, self._valid, window=window)
        return self._windows[window]

    # Imagining --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _imagine(self, device: str) -> None:
        """Replace the oldest rollouts by new ones."""
        batch = self._source.sample(self._start_spec(device))
        assert isinstance(batch, SequenceBatch)
        going = ~batch.is_last[:, 0]
        start = {key: value[:, 0][going] for key, value in batch.observation.items()}
        count = int(going.sum())
        if not count:
            return
        records, lengths = self._roll_out(start, batch.reward[:, 0][going])
        slots = (self._next + np.arange(count)) % len(self._valid)
        rows = slots[:, None] * self._length + np.arange(self._length)
        for name, value in records.items():
            self._storage.write(name, rows.reshape(-1), value.reshape(count * self._length, *value.shape[2:]))
        self._valid[slots] = lengths
        self._next = int((self._next + count) % len(self._valid))
        self._windows.clear()

    def _roll_out(self, start: Mapping[str, Tensor], reward: Tensor) -> tuple[Fields, np.ndarray]:
        """Records [rollout, time, ...], and how many of each rollout count."""
        simulator, count = self._simulator(), len(reward)
        state = simulator.observe(start)
        seen = {key: value.cpu().numpy() for key, value in start.items()}
        records: dict[str, list[np.ndarray]] = {name: [] for name in self._fields}
        memory = self._initial_memory(count)
        going, lengths = np.ones(count, bool), np.full(count, self._length)
        terminal = np.zeros(count, bool)
        for time in range(self._length):
            last = (time == self._horizon) | terminal
            action, memory = self._act(seen, memory, state, simulator)
            flags = {"is_first": np.full(count, time == 0), "is_last": last & going, "is_terminal": terminal & going}
            stored = np.where(last.reshape(-1, *[1] * (action.ndim - 1)), 0, action)
            self._remember(records, seen, stored, reward, flags)
            lengths[going & last] = time + 1
            going &= ~last
            if time == self._horizon:
                break
            encoded = self._codec.encode(torch.as_tensor(action, device=reward.device))
            state, reward, continuation = simulator.step(state, encoded)
            terminal = (torch.rand_like(continuation) >= continuation).cpu().numpy()
            seen = {key: value.cpu().numpy() for key, value in simulator.observation(state).items()}
        return {name: np.stack(values, 1) for name, values in records.items()}, lengths

    def _remember(
        self, records: dict[str, list[np.ndarray]], seen: Mapping[str, np.ndarray], action: np.ndarray, reward: Tensor,
        flags: Mapping[str, np.ndarray],
    ) -> None:  # fmt: skip
        values: dict[str, np.ndarray] = {"action": action, "reward": reward.float().cpu().numpy(), **flags}
        values |= {OBSERVATION_PREFIX + key: value for key, value in seen.items()}
        for name, spec in self._fields.items():
            if values[name].shape[1:] != spec.shape:
                raise DataError(
                    f"The model predicts '{name}' with shape {values[name].shape[1:]}, expected {spec.shape}."
                )
            records[name].append(values[name].astype(spec.dtype))

    def _initial_memory(self, count: int) -> AgentState:
        return self._context.agent.initial_state(count) if self._policy == "agent" and self._context.agent else {}

    def _act(
        self, seen: Mapping[str, np.ndarray], memory: AgentState, state: Any, simulator: Simulator
    ) -> tuple[np.ndarray, AgentState]:
        """Stored actions."""
        if self._policy == "agent":
            assert self._context.agent is not None
            return self._context.agent.act(dict(seen), memory, mode="train")
        if self._policy == "model":
            return self._codec.decode(simulator.policy(state)).cpu().numpy(), memory
        spec, count = self._codec.spec, len(next(iter(seen.values())))
        if spec.kind == "continuous":
            return torch.empty(count, *spec.shape).uniform_(-1.0, 1.0).numpy(), memory
        draws = [torch.randint(classes, (count,), dtype=torch.int32) for classes in spec.classes]
        return torch.stack(draws, -1).numpy(), memory

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self, folder: Path) -> dict[str, Any]:
        save_rows(self._storage, np.array([self._storage.rows]), folder)
        valid, random = torch.from_numpy(self._valid.copy()), json.dumps(self._rng.bit_generator.state)
        return {"valid": valid, "next": self._next, "drawn": self._drawn, "random": random}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        load_rows(self._storage, np.array([self._storage.rows]), folder)
        self._valid = state["valid"].numpy().copy()
        self._next, self._drawn = state["next"], state["drawn"]
        self._rng.bit_generator.state = json.loads(state["random"])
        self._windows.clear()

    def load_shares(self, shares: Sequence[tuple[dict[str, Any], Path]], own: slice) -> None:
        """A rank that is new imagines its own before its first batch."""
        if ranks.rank() < len(shares):
            self.load_state_dict(*shares[ranks.rank()])

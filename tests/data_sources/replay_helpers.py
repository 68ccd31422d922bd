"""A run that writes records whose observation says which environment and which record of its stream they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.records import BatchSpec, FieldSpec, RecordBlock, SequenceBatch

FIELDS = {
    "observation.vector": FieldSpec((2,), "float32"),
    "observation.image": FieldSpec((4, 4, 3), "uint8"),
    "action": FieldSpec((1,), "int32"),
    "reward": FieldSpec((), "float32"),
    "is_first": FieldSpec((), "bool"),
    "is_last": FieldSpec((), "bool"),
    "is_terminal": FieldSpec((), "bool"),
    "latent.deter": FieldSpec((3,), "float32"),
}
SPEC = BatchSpec(batch_size=4, sequence_length=5, context=1)


def make(folder: Path, *, capacity: int = 240, num_envs: int = 3, seed: int = 0, **settings) -> SequenceReplay:
    replay = SequenceReplay(capacity=capacity, **settings)
    replay.prepare(SourceContext(FIELDS, num_envs, "cpu", seed, folder))
    return replay


class Feeder:
    """Episodes of different lengths in each environment; the last record of an episode comes in a block of its own."""

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs = num_envs
        self.count = np.zeros(num_envs, np.int64)  # records of each stream so far
        self.age = np.zeros(num_envs, np.int64)  # records of the running episode

    def feed(self, replay: SequenceReplay, steps: int) -> None:
        for _ in range(steps):
            replay.add(RecordBlock(self._fields(np.arange(self.num_envs), last=False)))
            ended = np.flatnonzero(self.age >= 5 + 3 * np.arange(self.num_envs))
            if len(ended):
                fields = self._fields(ended, last=True)
                del fields["action"], fields["latent.deter"]
                replay.add(RecordBlock(fields, ended))
                self.age[ended] = 0

    def _fields(self, envs: np.ndarray, *, last: bool) -> dict[str, np.ndarray]:
        sequence = self.count[envs]
        first = self.age[envs] == 0
        self.count[envs] += 1
        self.age[envs] += 1
        flags = np.full(len(envs), last)
        return {
            "observation.vector": np.stack([envs, sequence], 1).astype(np.float32),
            "observation.image": np.broadcast_to(sequence[:, None, None, None] % 256, (len(envs), 4, 4, 3)).astype(
                "u1"
            ),
            "action": (sequence[:, None] + 1).astype(np.int32),
            "reward": sequence.astype(np.float32),
            "is_first": first,
            "is_last": flags,
            "is_terminal": flags & (envs % 2 == 0),
            "latent.deter": np.full((len(envs), 3), 7.0, np.float32) * sequence[:, None].astype(np.float32),
        }


def learn(replay: SequenceReplay, spec: BatchSpec = SPEC) -> SequenceBatch:
    """A batch, and a write-back that depends on it, as an update would do."""
    batch = replay.sample(spec)
    latents = batch.extras["latent.deter"][:, spec.context :] + batch.reward[:, spec.context :, None] + 0.5
    replay.update(batch.indices[:, spec.context :], {"latent.deter": latents})
    return batch


def tensors(batch: SequenceBatch) -> dict[str, torch.Tensor]:
    standard = {name: getattr(batch, name) for name in ("action", "reward", "is_first", "is_last", "is_terminal")}
    every = standard | batch.observation | batch.extras | {"indices": batch.indices}
    return {name: tensor.clone() for name, tensor in every.items()}


def assert_same(left: list[SequenceBatch] | list[dict], right: list[SequenceBatch] | list[dict]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        a, b = (x if isinstance(x, dict) else tensors(x) for x in (a, b))
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name], b[name]), name


def round_trip(state: dict, folder: Path) -> dict:
    """The state as the checkpoint manager would store and read it: without executing code."""
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)

"""Environments whose observation says which environment and which record of its stream they show, and their collector.

Environment e has episodes of 3 + e decisions, which terminate where e is even and are truncated where it is odd. The
reward on arriving at a record is that record's number plus a tenth of the environment's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.stream import StreamSource
from rl_lab.records import FieldSpec, RecordBlock, VectorStep

ENVS, LENGTH = 3, 8
FIELDS = {
    "observation.vector": FieldSpec((2,), "float32"),
    "action": FieldSpec((1,), "int32"),
    "reward": FieldSpec((), "float32"),
    "is_first": FieldSpec((), "bool"),
    "is_last": FieldSpec((), "bool"),
    "is_terminal": FieldSpec((), "bool"),
    "note": FieldSpec((), "float32"),
}


def make_stream(folder: Path, *, seed: int = 0, **settings) -> StreamSource:
    stream = StreamSource(**({"length": LENGTH, "epochs": 2} | settings))
    stream.prepare(SourceContext(FIELDS, ENVS, "cpu", seed, folder))
    return stream


class Collector:
    """Hands steps to a stream in the order in which the orchestrator does."""

    def __init__(self) -> None:
        self.envs = np.arange(ENVS)
        self.record = np.zeros(ENVS, np.int64)  # number of the current record in each stream
        self.age = np.zeros(ENVS, np.int64)  # decisions of the running episode

    def collect(self, stream: StreamSource, decisions: int) -> None:
        for _ in range(decisions):
            fields = self._observed(self.envs)
            fields |= {"action": self.record[:, None].astype(np.int32), "note": self.record.astype(np.float32)}
            fields["is_last"] = fields["is_terminal"] = np.zeros(ENVS, bool)
            stream.add(RecordBlock(fields))
            self.record += 1
            self.age += 1
            ended = np.flatnonzero(self.age == 3 + self.envs)
            if len(ended):
                last = self._observed(ended) | {"is_last": np.ones(len(ended), bool), "is_terminal": ended % 2 == 0}
                stream.add(RecordBlock(last, ended))
                self.record[ended] += 1
                self.age[ended] = 0
            now = self._observed(self.envs)
            stream.follow(VectorStep({"vector": now["observation.vector"]}, now["reward"], now["is_first"]))

    def _observed(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        record, first = self.record[envs], self.age[envs] == 0
        return {
            "observation.vector": np.stack([envs, record], 1).astype(np.float32),
            "reward": np.where(first, 0.0, record + 0.1 * envs).astype(np.float32),
            "is_first": first,
        }

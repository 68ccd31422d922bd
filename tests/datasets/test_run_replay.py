"""The replay of a run as a dataset: bit for bit what was collected, also where the ring has come round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.overrides import QUIET

from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import open_dataset, write_dataset
from rl_lab.experiment.train import run_training
from rl_lab.records import Fields, RecordBlock

NUM_ENVS, CAPACITY = 2, 90  # over both; 65 records are collected in each


def play(folder: Path, storage: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Fields]]:
    """A run of random actions with a small replay, and all records of each environment."""
    streams: list[list[Fields]] = [[] for _ in range(NUM_ENVS)]
    add = SequenceReplay.add

    def noting(self: SequenceReplay, block: RecordBlock) -> None:
        environments = range(NUM_ENVS) if block.indices is None else block.indices.tolist()
        for row, environment in enumerate(environments):
            record = {name: np.array(value[row]) for name, value in block.fields.items()}
            streams[environment].append({"action": np.zeros(1, np.int32), **record})
        add(self, block)

    monkeypatch.setattr(SequenceReplay, "add", noting)
    overrides = ["+experiment=random", "environment.id=CartPole-v1", f"environment.num_envs={NUM_ENVS}"]
    overrides += ["training.total_timesteps=130", f"data_sources.replay.storage={storage}", "evaluation.episodes=1"]
    run = run_training([*overrides, f"data_sources.replay.capacity={CAPACITY}", *QUIET, f"run_root={folder}"]).folder
    names = streams[0][0].keys()
    return run, [{name: np.stack([record[name] for record in stream]) for name in names} for stream in streams]


def episodes_of(records: Fields) -> list[Episode]:
    """The episodes of the last records of one environment that the ring has room for."""
    held = {name: value[-(CAPACITY // NUM_ENVS) :] for name, value in records.items()}
    starts = np.unique(np.append(0, np.flatnonzero(held["is_first"])))
    ends = np.append(starts[1:], len(held["is_first"]))
    parts = [{name: value[start:end] for name, value in held.items()} for start, end in zip(starts, ends, strict=True)]
    return [Episode.from_records(part) for part in parts if len(part["action"]) > 1]


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_replay_reads_as_it_was_written(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the run directory, and from a file that it was converted to."""
    run, streams = play(tmp_path, storage, monkeypatch)
    expected = [episode for records in streams for episode in episodes_of(records)]
    assert min(len(records["reward"]) for records in streams) > CAPACITY // NUM_ENVS
    for path in (run, write_dataset(tmp_path / "copy.npz", open_dataset(run).episodes(), Attributes())):
        read = list(open_dataset(path).episodes())
        assert len(read) == len(expected) > NUM_ENVS
        for one, other in zip(read, expected, strict=True):
            for left, right in ((one.observation["vector"], other.observation["vector"]), (one.action, other.action)):
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)
            assert one.reward is not None
            np.testing.assert_array_equal(one.reward, other.reward)
            assert one.terminated == other.terminated

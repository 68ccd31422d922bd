"""The on-policy stream: what follows each decision, minibatches, freshness, and going on from a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_helpers import ENVS, LENGTH, Collector, make_stream

from rl_lab.data_sources.stream import StreamSource
from rl_lab.errors import CheckpointError, ConfigError, DataError
from rl_lab.records import BatchSpec, RecordBlock, RolloutBatch

STEPS, SEQUENCES = BatchSpec(5, 1), BatchSpec(2, 4)


def filled(folder: Path, rollouts: int = 1) -> tuple[StreamSource, Collector]:
    """A stream whose last rollout is full and unused."""
    stream, collector = make_stream(folder), Collector()
    for number in range(rollouts):
        collector.collect(stream, LENGTH)
        if number + 1 < rollouts:
            stream.drop()
    return stream, collector


def used(stream: StreamSource, spec: BatchSpec) -> list[RolloutBatch]:
    batches = []
    while stream.ready(spec):
        batches.append(stream.sample(spec))
    return batches


@pytest.mark.parametrize("rollouts", [1, 2, 3])
def test_every_decision_meets_its_successor(tmp_path, rollouts):
    """Reward and flags of row t are those of the record after decision t, across episode and rollout boundaries."""
    stream, _ = filled(tmp_path, rollouts)
    rollout = stream.sample(STEPS).rollout
    assert rollout.reward.shape == (LENGTH, ENVS)
    for env in range(ENVS):
        for t in range(LENGTH):
            decision = (rollouts - 1) * LENGTH + t
            length = 3 + env
            episode, age = divmod(decision, length)
            record = episode * (length + 1) + age  # the end records are numbered, but have no row
            assert rollout.observation["vector"][t, env].tolist() == [env, record]
            assert rollout.action[t, env].item() == record
            assert rollout.extras["note"][t, env].item() == record
            assert rollout.is_first[t, env].item() == (age == 0)
            assert rollout.reward[t, env].item() == pytest.approx(record + 1 + 0.1 * env)
            ends = age == length - 1
            assert rollout.is_last[t, env].item() == ends
            assert rollout.is_terminal[t, env].item() == (ends and env % 2 == 0)


def test_truncated_episodes_keep_their_last_observation(tmp_path):
    """Only environment 1 is truncated: after its decisions 3 and 7, at its records 4 and 9."""
    stream, _ = filled(tmp_path)
    rollout = stream.sample(STEPS).rollout
    assert rollout.cut_indices.tolist() == [3 * ENVS + 1, 7 * ENVS + 1]
    assert rollout.cut["vector"].tolist() == [[1.0, 4.0], [1.0, 9.0]]


def test_what_follows_the_last_decision(tmp_path):
    """The observation that the next rollout begins with, and whether an episode begins there."""
    stream, collector = filled(tmp_path)
    rollout = stream.sample(STEPS).rollout
    assert rollout.following["vector"].tolist() == np.stack([collector.envs, collector.record], 1).tolist()
    assert rollout.following_first.tolist() == [False, True, False]


def test_every_decision_once_an_epoch(tmp_path):
    """Shuffled differently in each epoch; the last minibatch takes what is left; the very last one says so."""
    stream, _ = filled(tmp_path)
    batches = used(stream, STEPS)
    orders = [torch.cat([b.indices.flatten() for b in batches if b.epoch == epoch]).tolist() for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(range(LENGTH * ENVS))] * 2
    assert orders[0] != orders[1]
    assert [len(batch.indices) for batch in batches] == [5, 5, 5, 5, 4] * 2
    assert [batch.is_final for batch in batches] == [False] * 9 + [True]


def test_sequences_are_decisions_in_a_row(tmp_path):
    """A sequence stays in one environment and steps through time."""
    stream, _ = filled(tmp_path)
    batches = used(stream, SEQUENCES)
    indices = torch.cat([batch.indices for batch in batches if batch.epoch == 0])
    assert sorted(indices.flatten().tolist()) == list(range(LENGTH * ENVS))
    assert (indices % ENVS == indices[:, :1] % ENVS).all()
    assert (indices[:, 1:] - indices[:, :-1] == ENVS).all()
    assert set((indices[:, 0] // ENVS).tolist()) == {0, 4}


def test_only_fresh_data(tmp_path):
    """Not ready before the rollout is full, nor after it was used; no record is taken before that."""
    stream, collector = make_stream(tmp_path), Collector()
    collector.collect(stream, LENGTH - 1)
    assert not stream.ready(STEPS)
    assert len(stream) == (LENGTH - 1) * ENVS
    with pytest.raises(DataError, match="7 of 8 decisions"):
        stream.sample(STEPS)
    collector.collect(stream, 1)
    first = stream.sample(STEPS).rollout.number
    with pytest.raises(DataError, match="times: N"):
        collector.collect(stream, 1)
    used(stream, STEPS)
    assert len(stream) == 0
    collector.collect(stream, LENGTH)
    assert stream.sample(STEPS).rollout.number == first + 1


def test_drop_gives_up_the_rest(tmp_path):
    """After an early stop the next rollout is whole, with all its epochs."""
    stream, collector = filled(tmp_path)
    stream.sample(STEPS)
    stream.drop()
    assert not stream.ready(STEPS)
    collector.collect(stream, LENGTH)
    assert len(used(stream, STEPS)) == 10


@pytest.mark.parametrize("decisions", [0, 5, LENGTH])
@pytest.mark.parametrize("drawn", [0, 3, 7])
def test_going_on_from_a_checkpoint(tmp_path, decisions, drawn):
    """Inside a rollout and inside its epochs: the batches that follow are those of the stream that was never saved."""
    stream, collector = make_stream(tmp_path), Collector()
    collector.collect(stream, LENGTH)
    used(stream, STEPS)
    collector.collect(stream, decisions)
    if stream.ready(STEPS):
        for _ in range(drawn):
            stream.sample(STEPS)
    state = stream.state_dict(tmp_path / "saved")
    other, twin = make_stream(tmp_path, seed=1), copy.deepcopy(collector)
    other.load_state_dict(copy.deepcopy(state), tmp_path / "saved")
    for source, feed in ((stream, collector), (other, twin)):
        feed.collect(source, LENGTH - decisions)
    left, right = used(stream, STEPS), used(other, STEPS)
    assert len(left) == len(right) > 0
    for one, two in zip(left, right, strict=True):
        assert torch.equal(one.indices, two.indices)
        assert (one.epoch, one.is_final) == (two.epoch, two.is_final)
    for field in fields(left[0].rollout):
        one, two = getattr(left[0].rollout, field.name), getattr(right[0].rollout, field.name)
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_errors_say_what_to_do(tmp_path):
    """Lengths that do not fit, records of some environments, another run's checkpoint."""
    stream, collector = filled(tmp_path)
    with pytest.raises(DataError, match=r"divisor of data_sources\.stream\.length"):
        stream.sample(BatchSpec(2, 3))
    with pytest.raises(ConfigError, match="length=0"):
        StreamSource(length=0, epochs=1)
    state = stream.state_dict(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="length=8"):
        make_stream(tmp_path, length=4).load_state_dict(state, tmp_path / "saved")
    (tmp_path / "saved" / "action.npy").unlink()
    with pytest.raises(CheckpointError, match="missing or cut off"):
        make_stream(tmp_path).load_state_dict(state, tmp_path / "saved")
    part = {name: value[:1] for name, value in collector._observed(collector.envs).items()}
    with pytest.raises(DataError, match="all environments"):
        make_stream(tmp_path).add(RecordBlock(part | {"is_last": np.zeros(1, bool)}, np.array([0])))


def test_memory_is_that_of_one_rollout(tmp_path):
    """Known before the first step."""
    per_record = 2 * 4 + 4 + 4 + 3 + 4
    assert make_stream(tmp_path).memory() == {"ram": LENGTH * ENVS * per_record, "gpu": 0, "disk": 0}

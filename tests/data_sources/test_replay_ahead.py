"""Small uniform batches are drawn several at once, and nobody can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_helpers import SPEC, Feeder, assert_same, make, round_trip, tensors

from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.records import BatchSpec


def uniform(folder, **settings) -> SequenceReplay:
    return make(folder, online_queue=False, prefetch=False, **settings)


def bursts(replay: SequenceReplay, feeder: Feeder, lengths: list[int]) -> list[dict]:
    batches = []
    for length in lengths:
        feeder.feed(replay, 5)
        batches += [tensors(replay.sample(SPEC)) for _ in range(length)]
    return batches


def test_as_many_are_drawn_at_once_as_the_last_burst_took(tmp_path):
    """At most sixteen; and the newest records are among those that can be drawn as soon as they are there."""
    replay, feeder, draws = uniform(tmp_path), Feeder(), []
    draw = replay._ring.index.draw
    replay._ring.index.draw = lambda rng, *, count, **more: (draws.append(count // 4), draw(rng, count=count, **more))[
        1
    ]
    newest = 0
    for length in (6, 6, 3, 20, 20):
        draws.append(0)
        feeder.feed(replay, 20)
        for _ in range(length):
            batch = replay.sample(SPEC)
            written = torch.from_numpy(feeder.count)[batch.observation["vector"][:, 0, 0].long()]
            assert (batch.reward[:, -1] < written).all()
            newest += int((batch.reward[:, -1] >= written - 20).sum())
    assert draws == [0, *[1] * 6, 0, 6, 0, 6, 0, 3, *[1] * 17, 0, 16, 4]
    assert newest > 10
    replay.close()


def test_draws_stay_uniform_over_all_windows(tmp_path):
    """Every window start has the same chance, whichever of the batches it is drawn for."""
    replay, feeder = uniform(tmp_path, capacity=60), Feeder()
    feeder.feed(replay, 12)
    counts: dict[int, int] = {}
    for _ in range(500):
        for _ in range(6):
            for start in replay.sample(SPEC).indices[:, 0].tolist():
                counts[start] = counts.get(start, 0) + 1
        replay._ahead.records_changed()
    expected = 500 * 6 * 4 / len(counts)
    assert len(counts) == int(replay._ring.index.window_counts(SPEC.window).sum())
    assert all(abs(count - expected) < 5 * np.sqrt(expected) for count in counts.values())
    replay.close()


@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_a_checkpoint_within_a_burst_keeps_what_was_drawn(taken, tmp_path):
    """The resumed run gets the batches of the uninterrupted one, and guesses the same lengths."""
    whole, feeder = uniform(tmp_path / "whole"), Feeder()
    bursts(whole, feeder, [7, 7])
    feeder.feed(whole, 5)
    for _ in range(taken):
        whole.sample(SPEC)
    (tmp_path / "saved").mkdir()
    state = round_trip(whole.state_dict(tmp_path / "saved"), tmp_path)
    resumed = uniform(tmp_path / "resumed")
    resumed.load_state_dict(state, tmp_path / "saved")
    other = Feeder()
    other.count, other.age = feeder.count.copy(), feeder.age.copy()
    left = [tensors(whole.sample(SPEC)) for _ in range(7 - taken)] + bursts(whole, feeder, [7, 2, 3])
    right = [tensors(resumed.sample(SPEC)) for _ in range(7 - taken)] + bursts(resumed, other, [7, 2, 3])
    assert_same(left, right)


def test_write_backs_are_seen_by_the_next_batch(tmp_path):
    """What was drawn ahead before them is thrown away."""
    replay, feeder = uniform(tmp_path), Feeder()
    bursts(replay, feeder, [5])
    feeder.feed(replay, 1)
    for value in range(5):
        batch = replay.sample(SPEC)
        assert (batch.extras["latent.deter"] == value - 1).all() or value == 0
        everything = np.arange(3 * feeder.count.max()).reshape(-1, 3)
        replay.update(everything, {"latent.deter": np.full((*everything.shape, 3), value, np.float32)})


def test_two_kinds_of_batches_do_not_mix(tmp_path):
    """Each has its own shape, though the other was drawn ahead."""
    replay, feeder = uniform(tmp_path), Feeder()
    bursts(replay, feeder, [5, 1])
    assert replay.sample(BatchSpec(2, 3)).reward.shape == (2, 3)
    assert replay.sample(SPEC).reward.shape == (4, 6)

"""Prioritised sampling of the replay: what is drawn how often, what it counts, what survives a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from replay_helpers import FIELDS, Feeder, assert_same, make, round_trip, tensors

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.errors import ConfigError, DataError
from rl_lab.records import BatchSpec

SPEC = BatchSpec(batch_size=8, sequence_length=3, context=2)


def drawn_counts(replay: SequenceReplay, spec: BatchSpec, rounds: int) -> dict[int, int]:
    """How often each record was the one to be trained on."""
    counts: dict[int, int] = {}
    for _ in range(rounds):
        indices = replay.sample(spec).indices
        assert indices is not None
        for record in indices[:, spec.context].tolist():
            counts[record] = counts.get(record, 0) + 1
    return counts


def valid_records(feeder: Feeder, replay: SequenceReplay, spec: BatchSpec) -> list[int]:
    """Ids of the records that have a whole window around them, from first principles."""
    length = replay._ring.index.length
    return [
        number * feeder.num_envs + env
        for env, count in enumerate(feeder.count.tolist())
        for number in range(max(0, count - length) + spec.context, count - spec.sequence_length + 1)
    ]


@pytest.mark.parametrize("steps", [20, 200])
def test_draws_follow_the_priorities(tmp_path: Path, steps: int) -> None:
    """A chi-square test against p^α over exactly the valid windows, before and after the ring has come round."""
    replay, feeder = make(tmp_path, sampling="prioritized", alpha=0.7), Feeder()
    feeder.feed(replay, steps)
    replay.sample(SPEC)
    ids = np.array(valid_records(feeder, replay, SPEC))
    priorities = np.random.default_rng(0).random(len(ids)) * 3.0 + 0.05
    replay.update(ids, {"priority": priorities})
    counts = drawn_counts(replay, SPEC, 2500)
    assert set(counts) <= set(ids.tolist())
    share = priorities**0.7 / (priorities**0.7).sum()
    expected = share * sum(counts.values())
    observed = np.array([counts.get(record, 0) for record in ids.tolist()])
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = len(ids) - 1
    # Stratified draws vary less than independent ones, so only the upper tail (about 4.5 deviations) can fail.
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees)


def test_weights_make_up_for_the_uneven_draws(tmp_path: Path) -> None:
    """w = (N·P)^-β, divided by the largest of the batch; β rises with the records."""
    replay, feeder = make(tmp_path, sampling="prioritized", alpha=1.0, beta=0.5, beta_records=10**6), Feeder()
    feeder.feed(replay, 30)
    first = replay.sample(SPEC)
    assert first.weight is not None
    torch.testing.assert_close(first.weight, torch.ones(8))
    ids = np.array(valid_records(feeder, replay, SPEC))
    priority = dict(zip(ids.tolist(), (1.0 + np.arange(len(ids)) % 7).tolist(), strict=True))
    replay.update(ids, {"priority": np.array(list(priority.values()))})
    batch = replay.sample(SPEC)
    assert batch.indices is not None
    assert batch.weight is not None
    own = np.array([priority[record] for record in batch.indices[:, SPEC.context].tolist()])
    expected = own**-replay.beta / (own**-replay.beta).max()
    np.testing.assert_allclose(batch.weight.numpy(), expected, rtol=1e-6)
    assert replay.beta == pytest.approx(0.5, abs=1e-4)
    late = make(tmp_path, sampling="prioritized", beta=0.4, beta_records=60)
    Feeder().feed(late, 30)
    late.sample(SPEC)
    assert late.beta == 1.0


def test_new_records_come_first(tmp_path: Path) -> None:
    """They get the highest priority there was, as soon as their window is complete."""
    replay, feeder = make(tmp_path, sampling="prioritized", alpha=1.0), Feeder()
    feeder.feed(replay, 30)
    replay.sample(SPEC)
    old = np.array(valid_records(feeder, replay, SPEC))
    priorities = np.full(len(old), 1e-6)
    priorities[0] = 50.0
    replay.update(old, {"priority": priorities})
    feeder.feed(replay, 4)
    counts = drawn_counts(replay, SPEC, 50)
    fresh = set(valid_records(feeder, replay, SPEC)) - set(old.tolist())
    assert fresh <= set(counts)
    assert set(counts) <= fresh | {int(old[0])}


def test_new_records_get_the_present_maximum(tmp_path: Path) -> None:
    """Not the largest ever seen: an outlier whose record has a new priority by now does not raise the others."""
    replay, feeder = make(tmp_path, sampling="prioritized", alpha=1.0), Feeder()
    feeder.feed(replay, 30)
    replay.sample(SPEC)
    old = np.array(valid_records(feeder, replay, SPEC))
    replay.update(old, {"priority": np.full(len(old), 1e3)})
    counts = feeder.count.tolist()
    everything = np.array([n * feeder.num_envs + env for env, count in enumerate(counts) for n in range(count)])
    replay.update(everything, {"priority": np.full(len(everything), 2.0)})
    feeder.feed(replay, 4)
    draws = drawn_counts(replay, SPEC, 200)
    fresh = set(valid_records(feeder, replay, SPEC)) - set(old.tolist())
    drawn = sum(draws.get(record, 0) for record in fresh) / sum(draws.values())
    assert drawn == pytest.approx(len(fresh) / (len(fresh) + len(old)), rel=0.15)


def test_priority_zero_is_never_drawn(tmp_path: Path) -> None:
    """And where nothing else is left, the replay says so."""
    replay, feeder = make(tmp_path, sampling="prioritized"), Feeder()
    feeder.feed(replay, 30)
    replay.sample(SPEC)
    ids = np.array(valid_records(feeder, replay, SPEC))
    priorities = (np.arange(len(ids)) % 2).astype(np.float64)
    replay.update(ids, {"priority": priorities})
    assert set(drawn_counts(replay, SPEC, 100)) <= set(ids[1::2].tolist())
    replay.update(ids, {"priority": np.zeros(len(ids))})
    with pytest.raises(DataError, match="all priorities are 0"):
        replay.sample(SPEC)


def test_overwritten_records_are_left_alone(tmp_path: Path) -> None:
    """A late priority must not go to the record that took the place."""
    replay, feeder = make(tmp_path, sampling="prioritized", alpha=1.0), Feeder()
    feeder.feed(replay, 30)
    old = replay.sample(SPEC).indices
    assert old is not None
    feeder.feed(replay, 200)
    replay.update(old[:, 2], {"priority": np.full(8, 1e9)})
    counts = drawn_counts(replay, SPEC, 60)
    assert max(counts.values()) < 60


def test_another_window_shape_has_other_starts(tmp_path: Path) -> None:
    """The same priorities, but exactly the windows that are complete for that shape."""
    replay, feeder = make(tmp_path, capacity=60, sampling="prioritized"), Feeder()
    for steps, spec in [(25, SPEC), (3, BatchSpec(8, 1)), (2, BatchSpec(8, 6, context=3)), (9, SPEC)]:
        feeder.feed(replay, steps)
        counts = drawn_counts(replay, spec, 80)
        assert set(counts) == set(valid_records(feeder, replay, spec))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_a_restored_replay_goes_on_exactly(tmp_path: Path, storage: str, prefetch: bool) -> None:
    """Same draws, same weights, same new priorities; and saving by itself changes nothing."""

    def learn(replay: SequenceReplay) -> dict[str, torch.Tensor]:
        batch = replay.sample(SPEC)
        assert batch.indices is not None
        assert batch.weight is not None
        error = (batch.reward[:, 2] % 11.0) + 0.1
        replay.update(batch.indices[:, 2], {"priority": error, "latent.deter": batch.extras["latent.deter"][:, 2] + 1})
        return tensors(batch) | {"weight": batch.weight.clone()}

    settings = {"sampling": "prioritized", "storage": storage, "prefetch": prefetch, "beta_records": 400}
    replay, feeder = make(tmp_path / "a", **settings), Feeder()
    untouched, twin = make(tmp_path / "c", **settings), Feeder()
    for own, other in ((replay, feeder), (untouched, twin)):
        other.feed(own, 10)
        for _ in range(30):
            other.feed(own, 3)
            learn(own)
        other.feed(own, 1)  # records that are still staged when the state is taken
    folder = tmp_path / "state"
    folder.mkdir()
    state = round_trip(replay.state_dict(folder), tmp_path)
    replay.committed()
    if storage == "disk":
        replay.close()
    restored = make(tmp_path / ("a" if storage == "disk" else "b"), **settings)
    restored.load_state_dict(state, folder)
    results: list[list[dict]] = [[], []]
    for own, other, result in ((untouched, twin, results[0]), (restored, feeder, results[1])):
        for _ in range(30):
            result.append(learn(own))
            other.feed(own, 2)
    assert_same(results[0], results[1])


def test_uniform_replay_takes_no_priorities(tmp_path: Path) -> None:
    """It says what it stores instead."""
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 20)
    batch = replay.sample(SPEC)
    assert batch.weight is None
    with pytest.raises(DataError, match="stores no field 'priority'"):
        replay.update(batch.indices[:, 2], {"priority": np.ones(8)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sampling": "prioritised"}, "uniform or prioritized"), ({"alpha": -1.0}, "alpha"), ({"beta": 1.5}, "beta=1.5")],
)
def test_wrong_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SequenceReplay(capacity=100, **settings)


def test_wrong_priorities_are_refused(tmp_path: Path) -> None:
    """NaN would spread through the tree; a wrong shape would go to wrong records."""
    replay, feeder = make(tmp_path, sampling="prioritized"), Feeder()
    feeder.feed(replay, 20)
    indices = replay.sample(SPEC).indices
    assert indices is not None
    for bad in (np.nan, -1.0, np.inf):
        with pytest.raises(DataError, match="negative, NaN or infinite"):
            replay.update(indices[:, 2], {"priority": np.full(8, bad)})
    with pytest.raises(DataError, match="shape"):
        replay.update(indices, {"priority": np.ones(8)})


def test_memory_counts_the_tree(tmp_path: Path) -> None:
    """What the plan announces includes the priorities."""
    plain, prioritized = make(tmp_path), make(tmp_path, sampling="prioritized")
    assert prioritized.memory()["ram"] > plain.memory()["ram"]
    million = SequenceReplay(capacity=1_000_000, sampling="prioritized")
    million.prepare(SourceContext(FIELDS, 8, "cpu", 0, tmp_path))
    assert million._priorities is not None
    assert million._priorities.memory() < 20e6

"""What the replay promises: windows, additions, write-backs, the online queue and its error messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from replay_helpers import FIELDS, SPEC, Feeder, make, tensors

from rl_lab.buffers import capacity as room
from rl_lab.buffers.storage import DeviceStorage
from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.errors import ConfigError, DataError
from rl_lab.records import BatchSpec, RecordBlock

STORAGES = ("ram", "disk")


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> str:
    return request.param


def check_windows(batch, feeder: Feeder, length: int) -> None:
    """Consecutive records of one stream, all still held, each with the fields it was added with."""
    env, sequence = batch.observation["vector"].unbind(-1)
    assert (env == env[:, :1]).all()
    assert (sequence.diff(dim=1) == 1).all()
    written = torch.from_numpy(feeder.count)[env.long()]
    assert (sequence >= written - length).all()
    assert (sequence < written).all()
    assert (batch.indices == sequence * feeder.num_envs + env).all()
    assert (batch.observation["image"][..., 0, 0, 0] == sequence.long() % 256).all()
    assert (batch.reward == sequence).all()
    assert (batch.action[..., 0] == torch.where(batch.is_last, 0, sequence + 1)).all()  # a last record has no action


def test_windows_are_consecutive_records_of_one_stream_as_the_ring_wraps(storage, tmp_path):
    """Windows cross episodes and the ring's physical end, but never the write position."""
    replay, feeder, crossed = make(tmp_path, storage=storage), Feeder(), False
    for _ in range(40):
        feeder.feed(replay, 7)
        batch = replay.sample(SPEC)
        check_windows(batch, feeder, length=80)
        crossed |= bool(batch.is_first[:, 1:].any())
        assert (batch.is_first[:, 1:] == batch.is_last[:, :-1]).all()
    assert crossed
    assert feeder.count.min() > 160
    assert len(replay) == 240
    replay.close()


def test_batch_layout_and_dtypes(tmp_path):
    """[batch, context + sequence]; images stay uint8; other stored fields are extras."""
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 30)
    batch = replay.sample(SPEC)
    assert batch.observation["image"].shape == (4, 6, 4, 4, 3)
    assert batch.observation["image"].dtype == torch.uint8
    assert batch.action.dtype == torch.int32
    assert batch.is_first.dtype == torch.bool
    assert set(batch.extras) == {"latent.deter"}
    some = replay.sample(BatchSpec(2, 3, fields=("observation.vector",)))
    assert set(some.observation) == {"vector"}
    assert not some.extras
    assert some.reward.shape == (2, 3)


def test_draws_are_uniform_over_all_windows_of_all_streams(tmp_path):
    """A longer stream is drawn from more often: every window start has the same chance."""
    replay, feeder = make(tmp_path, online_queue=False, num_envs=2, capacity=60), Feeder(2)
    feeder.feed(replay, 19)
    windows = feeder.count - SPEC.window + 1
    assert windows[0] != windows[1]
    starts = torch.cat([replay.sample(BatchSpec(64, 5, 1)).indices[:, 0] for _ in range(300)])
    counts = torch.bincount(starts).double()
    seen = counts[counts > 0]
    assert len(seen) == windows.sum()
    expected = len(starts) / windows.sum()
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 2 * len(seen)  # its mean is len(seen) - 1; the bound is more than four deviations away


def test_a_window_can_be_drawn_as_soon_as_it_is_complete(tmp_path):
    replay, feeder = make(tmp_path, num_envs=1, capacity=50), Feeder(1)
    spec = BatchSpec(1, 5)
    feeder.feed(replay, 4)
    assert not replay.ready(spec)
    feeder.feed(replay, 1)
    assert replay.ready(spec)
    assert replay.sample(spec).indices.tolist() == [[0, 1, 2, 3, 4]]


def test_fields_that_a_block_lacks_are_zero_even_where_the_ring_held_others(storage, tmp_path):
    replay, feeder = make(tmp_path, storage=storage, online_queue=False), Feeder()
    feeder.feed(replay, 200)
    batch = replay.sample(BatchSpec(64, 5))
    assert batch.is_last.any()
    assert (batch.extras["latent.deter"][batch.is_last] == 0).all()
    assert (batch.action[batch.is_last] == 0).all()
    replay.close()


def test_an_interrupted_episode_is_closed_by_the_next_first_record(tmp_path):
    """An `is_first` without an `is_last` before it, in the same flush or in a later one."""
    replay = make(tmp_path, num_envs=1, capacity=20)
    names = ("observation.vector", "reward")
    for position, first in enumerate([True, False, True, False, False, True]):
        fields = {name: np.zeros((1, *FIELDS[name].shape), FIELDS[name].dtype) for name in names}
        replay.add(RecordBlock(fields | {"is_first": np.array([first])}))
        if position == 4:
            assert len(replay) == 5  # flushes
    batch = replay.sample(BatchSpec(1, 6))
    assert batch.is_last.tolist() == [[False, True, False, False, True, False]]
    assert not batch.is_terminal.any()


def test_write_back_reaches_only_records_that_are_still_there(storage, tmp_path):
    """An id names a record, not a place: what was overwritten since must keep its own latents."""
    replay, feeder = make(tmp_path, storage=storage, online_queue=False, num_envs=1, capacity=20), Feeder(1)
    feeder.feed(replay, 12)
    held = int(feeder.count[0])
    early = torch.arange(held)[None]
    feeder.feed(replay, 12)
    replay.update(early, {"latent.deter": torch.full((1, held, 3), -1.0, dtype=torch.bfloat16)})
    now = replay.sample(BatchSpec(1, 20))
    first = int(now.indices[0, 0])
    assert 0 < first < held
    written = now.extras["latent.deter"][0, :, 0] == -1.0
    assert written.tolist() == [first + k < held for k in range(20)]
    replay.update(torch.tensor([10_000, -1]), {"latent.deter": torch.zeros(2, 3)})  # never existed: ignored
    replay.close()


@pytest.mark.parametrize("every", [1, 11])
def test_online_queue_serves_every_window_once_and_first(every, tmp_path):
    replay, feeder = make(tmp_path), Feeder()
    online, served = set(), []
    for step in range(1, 67):
        feeder.feed(replay, 1)
        online |= {(e, k * 6) for e in range(3) for k in range(int(feeder.count[e]) // 6)}
        if step % every == 0 and replay.ready(SPEC):
            left = len(online) - len(served)
            starts = replay.sample(SPEC).observation["vector"][:, 0].int().tolist()
            served += [tuple(start) for start in starts[: min(left, 4)]]
    while len(served) < len(online):
        served += [tuple(s) for s in replay.sample(SPEC).observation["vector"][:, 0].int().tolist()]
        served = served[: len(online)]
    assert sorted(served) == sorted(online)


def test_online_windows_that_were_overwritten_are_skipped(tmp_path):
    replay, feeder = make(tmp_path, capacity=60), Feeder()
    feeder.feed(replay, 100)
    for _ in range(10):
        check_windows(replay.sample(SPEC), feeder, length=20)


def test_a_batch_belongs_to_its_holder(tmp_path):
    """Memory is used again only when no tensor of the batch, nor a view of one, is left."""
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 60)
    spec = BatchSpec(100, 20)  # large enough for the pool
    held, copies = [], []
    for _ in range(8):
        batch = replay.sample(spec)
        held.append(batch.observation["image"][:, 3:])
        copies.append(held[-1].clone())
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    del batch, held
    assert len({replay.sample(spec).observation["image"].data_ptr() for _ in range(8)}) == 1


def test_start_after_delays_the_first_batch(tmp_path):
    replay, feeder = make(tmp_path, start_after=100), Feeder()
    feeder.feed(replay, 25)
    assert len(replay) < 100
    assert not replay.ready(SPEC)
    feeder.feed(replay, 20)
    assert replay.ready(SPEC)


def test_equal_seeds_give_equal_batches(tmp_path):
    batches = []
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        replay, feeder = make(tmp_path / folder, seed=seed, online_queue=False), Feeder()
        feeder.feed(replay, 40)
        batches.append(tensors(replay.sample(SPEC))["indices"])
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_memory_is_the_raw_bytes_of_the_records(storage, tmp_path):
    """Nothing is stored twice; the figure is the storage's own."""
    replay = make(tmp_path, storage=storage, capacity=3000)
    raw = 3000 * (2 * 4 + 48 + 4 + 4 + 3 + 12)
    assert replay.memory() == {"ram": 0, "gpu": 0, "disk": 0} | {storage: raw}
    allocated = sum(array.nbytes for array in replay._ring.storage.arrays.values())
    assert allocated <= 1.05 * raw
    if storage == "disk":
        assert sum(path.stat().st_size for path in tmp_path.glob("*.rows")) == raw
    replay.close()


def test_device_storage_holds_the_same_records(tmp_path, monkeypatch):
    """Records on the device are sampled and written by row, with the results of the RAM storage."""

    def on_device(self: SequenceReplay, context: SourceContext, rows: int) -> DeviceStorage:
        return DeviceStorage(context.fields, rows, "cpu")

    reference, feeder = make(tmp_path), Feeder()
    monkeypatch.setattr(SequenceReplay, "_make_storage", on_device)
    replay, other = make(tmp_path, storage="gpu"), Feeder()
    for _ in range(12):
        feeder.feed(reference, 9)
        other.feed(replay, 9)
        expected, batch = reference.sample(SPEC), replay.sample(SPEC)
        assert all(torch.equal(a, b) for a, b in zip(tensors(expected).values(), tensors(batch).values(), strict=True))
        for source in (reference, replay):
            source.update(batch.indices - 60, {"latent.deter": batch.extras["latent.deter"] + 1})  # some are gone
    state = replay.state_dict(tmp_path / "saved")
    restored = make(tmp_path, storage="gpu")
    restored.load_state_dict(state, tmp_path / "saved")
    assert torch.equal(restored.sample(SPEC).observation["image"], replay.sample(SPEC).observation["image"])


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_of_two_writes_to_a_record_the_later_stays(tmp_path, kind):
    """In all fields, although some of the records are gone: those that are written come once."""
    replay, feeder = make(tmp_path), Feeder()
    for _ in range(12):
        feeder.feed(replay, 9)
    batch, written = replay.sample(SPEC), []
    replay._ring.storage.write = lambda name, rows, values: written.append((rows, np.asarray(values)))
    ids = np.concatenate([batch.indices.numpy() - 60, batch.indices.numpy(), batch.indices.numpy()])
    deter = batch.extras["latent.deter"]
    values = torch.cat([deter, deter + 1, deter + 2])
    replay.update(ids, {"latent.deter": values.numpy() if kind == "array" else values})
    ((rows, stored),) = written
    assert len(set(rows.tolist())) == len(rows)
    alive, places = replay._ring.index.locate(batch.indices.numpy().reshape(-1))
    assert alive.all()
    found = {int(row): value for row, value in zip(rows, stored, strict=True)}
    for row, value in zip(places, (deter + 2).reshape(len(places), -1).numpy(), strict=True):
        np.testing.assert_array_equal(found[int(row)], value)


# Bad input ------------------------------------------------------------------------------------------------------------


def test_sampling_too_early_says_what_is_missing(tmp_path):
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 2)
    with pytest.raises(DataError, match="holds 6 records and no window of 6"):
        replay.sample(SPEC)


def test_capacity_below_one_window_is_refused(tmp_path):
    replay = make(tmp_path, capacity=15)
    for ask in (replay.ready, replay.sample):
        with pytest.raises(DataError, match=r"capacity=15 keeps 5 records .* at least 18"):
            ask(SPEC)


def test_capacity_that_cannot_fit_is_refused_with_one_that_can(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "available_ram", lambda: 79_000)
    with pytest.raises(
        DataError, match=r"of RAM when full .* data_sources.replay.capacity to 900 or less, or set .*storage to disk"
    ):
        make(tmp_path, capacity=10_000)
    monkeypatch.setattr(room, "available_disk", lambda folder: 79_000)
    with pytest.raises(DataError, match=r"of disk under .* data_sources.replay.capacity to 900 or less"):
        make(tmp_path, capacity=10_000, storage="disk")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": np.zeros((3, 1), np.float32)}, r"'reward'.* \(3, 1\), expected \(3,\)"),
        ({"observation.image": np.zeros((3, 8, 8, 3), np.uint8)}, r"'observation.image'.*expected \(3, 4, 4, 3\)"),
        ({"observation.image": np.zeros((3, 4, 4, 3), np.float32)}, r"'observation.image'.*float32, expected uint8"),
        ({"latent.deterr": np.zeros((3, 3), np.float32)}, r"'latent.deterr'.*Did you mean 'latent.deter'"),
    ],
)
def test_records_that_do_not_fit_are_refused_by_name(fields, message, tmp_path):
    with pytest.raises(DataError, match=message):
        make(tmp_path).add(RecordBlock(fields))


def test_a_block_for_some_environments_must_have_their_number(tmp_path):
    with pytest.raises(DataError, match=r"'reward'.* \(3,\), expected \(2,\)"):
        make(tmp_path).add(RecordBlock({"reward": np.zeros(3, np.float32)}, np.array([0, 2])))


def test_unknown_fields_are_refused_with_the_nearest_name(tmp_path):
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 20)
    with pytest.raises(DataError, match=r"'observation.imagee'.*Did you mean 'observation.image'"):
        replay.sample(BatchSpec(2, 3, fields=("observation.imagee",)))
    with pytest.raises(DataError, match=r"'latent.deta'.*Did you mean 'latent.deter'"):
        replay.update(torch.zeros(1, 1, dtype=torch.long), {"latent.deta": torch.zeros(1, 1, 3)})
    with pytest.raises(DataError, match=r"'latent.deter' has shape \(1, 1, 4\), expected \(1, 1, 3\)"):
        replay.update(torch.zeros(1, 1, dtype=torch.long), {"latent.deter": torch.zeros(1, 1, 4)})


@pytest.mark.parametrize(
    "settings", [{"storage": "tape"}, {"prefetch": "maybe"}, {"capacity": 0}, {"start_after": 500}]
)
def test_settings_are_checked(settings, tmp_path):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}="):
        make(tmp_path, **settings)


def test_gpu_storage_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(DataError, match="storage=gpu needs a run on the GPU"):
        make(tmp_path, storage="gpu")


def test_two_processes_cannot_share_disk_files(tmp_path: Path):
    replay = make(tmp_path, storage="disk")
    with pytest.raises(DataError, match="another process"):
        make(tmp_path, storage="disk")
    replay.close()
    make(tmp_path, storage="disk").close()


def test_auto_storage_goes_by_the_device_and_can_be_taken_to_another(tmp_path):
    """Without a GPU it is RAM; records that were saved from a GPU's memory come back there."""
    replay, feeder = make(tmp_path, storage="auto"), Feeder()
    feeder.feed(replay, 30)
    assert replay.memory()["ram"] > 0
    state = replay.state_dict(tmp_path / "saved") | {"storage": "gpu"}
    other = make(tmp_path, storage="auto")
    other.load_state_dict(state, tmp_path / "saved")
    assert len(other) == len(replay)


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_scan_gives_every_held_record_once(tmp_path, storage):
    """Stream by stream, oldest first, also when the ring has come round; `update` takes the same ids."""
    replay = make(tmp_path, capacity=60, storage=storage)
    Feeder().feed(replay, 40)  # more than 20 a stream
    seen, ids = [], []
    for start in range(0, len(replay), 25):
        part = replay.scan(start=start, count=25, fields=["observation.vector", "latent.deter"])
        seen.append(part.fields["observation.vector"])
        ids.append(part.indices)
        replay.update(part.indices, {"latent.deter": np.repeat(part.fields["observation.vector"][:, :1], 3, 1) + 7})
    env, number = np.concatenate(seen).T
    assert len(env) == len(np.unique(np.concatenate(ids))) == len(replay) == 60
    for index in range(3):
        np.testing.assert_array_equal(np.diff(number[env == index]), 1)
    written = replay.scan(start=0, count=60, fields=["latent.deter"]).fields["latent.deter"]
    np.testing.assert_array_equal(written[:, 0], env + 7)
    replay.close()

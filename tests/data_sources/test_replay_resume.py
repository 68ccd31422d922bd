"""A replay that goes on from a checkpoint gives the batches of one that was never stopped, however its process died."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_helpers import FIELDS, SPEC, Feeder, assert_same, learn, make, round_trip, tensors

from rl_lab.buffers.disk import DiskStorage
from rl_lab.buffers.journal import UndoJournals
from rl_lab.buffers.storage import HostStorage
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.errors import CheckpointError, DataError


def cycles(replay: SequenceReplay, feeder: Feeder, count: int) -> list[dict]:
    """Collect and learn: the ring of the tests (80 records a stream) wraps every dozen cycles."""
    batches = []
    for _ in range(count):
        feeder.feed(replay, 6)
        batches.append(tensors(learn(replay)))
    return batches


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("before", [2, 10, 40])  # one lap not complete; nearly; wrapped several times
def test_resumed_replay_equals_the_uninterrupted_one(storage, before, tmp_path):
    """With the ring wrapped and latents written back between the checkpoint and the end of the first process."""
    whole, feeder = make(tmp_path / "whole", storage=storage), Feeder()
    expected = cycles(whole, feeder, before + 25)
    whole.close()

    replay, feeder = make(tmp_path / "run", storage=storage), Feeder()
    cycles(replay, feeder, before)
    saved = tmp_path / "saved"
    state = replay.state_dict(saved)
    if storage == "ram":
        filled = sum(path.stat().st_size for path in saved.glob("*.npy"))
        assert filled < len(replay) * 79 + 8 * 256  # the filled records and small headers
    saved.mkdir(exist_ok=True)
    counts = feeder.count.copy(), feeder.age.copy()
    replay.committed()
    cycles(replay, feeder, 17)  # not seen on resume
    replay.close()

    resumed = make(tmp_path / "run", storage=storage)
    resumed.load_state_dict(round_trip(state, saved), saved)
    feeder.count, feeder.age = counts
    assert len(resumed) == min(240, int(counts[0].sum()))
    assert_same(cycles(resumed, feeder, 25), expected[before:])
    resumed.close()


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_running_replay_can_be_taken_back(storage, prefetch, tmp_path):
    """As after a loss that became NaN: the same object loads the state that it saved before, more than once."""
    replay, feeder = make(tmp_path / "run", storage=storage, prefetch=prefetch), Feeder()
    cycles(replay, feeder, 20)
    state = replay.state_dict(tmp_path / "saved")
    replay.committed()
    count, age = feeder.count.copy(), feeder.age.copy()
    first = cycles(replay, feeder, 20)
    for _ in range(2):
        feeder.feed(replay, 3)
        replay.load_state_dict(state, tmp_path / "saved")
        feeder.count, feeder.age = count.copy(), age.copy()
        assert_same(cycles(replay, feeder, 20), first)
    replay.close()


def test_going_back_further_than_the_last_checkpoint(tmp_path):
    """`keep_checkpoints` of the last ones can be resumed from; an older one says that its journal is gone."""
    replay, feeder = make(tmp_path, storage="disk", keep_checkpoints=2), Feeder()
    states, following = [], []
    for _ in range(4):
        cycles(replay, feeder, 15)
        states.append((replay.state_dict(tmp_path), feeder.count.copy(), feeder.age.copy()))
        replay.committed()
        following.append(cycles(replay, feeder, 1))
    assert len(list(tmp_path.glob("journal-*"))) == 2
    replay.close()
    for number in (3, 2):  # the newest, then the one before it, in the same files
        replay = make(tmp_path, storage="disk")
        state, feeder.count, feeder.age = states[number]
        feeder.count, feeder.age = feeder.count.copy(), feeder.age.copy()
        replay.load_state_dict(state, tmp_path)
        assert_same(cycles(replay, feeder, 1), following[number])
        replay.close()
    replay = make(tmp_path, storage="disk")
    with pytest.raises(CheckpointError, match=r"no journal 2, so it cannot go back"):
        replay.load_state_dict(states[1][0], tmp_path)
    replay.close()


def test_a_checkpoint_that_never_came_to_be_is_no_obstacle(tmp_path):
    """The process goes on after a failed checkpoint, is killed, and resumes from the one before that."""
    whole, feeder = make(tmp_path / "whole", storage="disk"), Feeder()
    expected = cycles(whole, feeder, 40)
    whole.close()
    replay, feeder = make(tmp_path / "run", storage="disk"), Feeder()
    cycles(replay, feeder, 20)
    state = replay.state_dict(tmp_path)
    replay.committed()
    counts = feeder.count.copy(), feeder.age.copy()
    cycles(replay, feeder, 9)
    replay.state_dict(tmp_path)  # say, the disk was full: committed() is not called
    cycles(replay, feeder, 9)
    replay.close()
    resumed = make(tmp_path / "run", storage="disk")
    resumed.load_state_dict(state, tmp_path)
    feeder.count, feeder.age = counts
    assert_same(cycles(resumed, feeder, 20), expected[20:])
    resumed.close()


# Killed at any moment -------------------------------------------------------------------------------------------------


class Bomb:
    """Kills its own process, without any farewell, at the n-th of the moments it is told of."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def tick(self) -> bool:
        """Whether this is the moment: do half of what you were about to do, then `explode`."""
        self.left -= 1
        return self.left == 0

    def explode(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Around every write to a file, in the middle of it, and between any two."""
        system_write, store = os.write, HostStorage.write

        def write(file: int, data: memoryview) -> int:
            if self.tick():
                system_write(file, data[: len(data) // 2])
                self.explode()
            return system_write(file, data)

        def write_rows(storage: HostStorage, name: str, rows: np.ndarray, values: np.ndarray) -> None:
            if self.tick():
                store(storage, name, rows[: len(rows) // 2], values[: len(rows) // 2])
                self.explode()
            store(storage, name, rows, values)

        os.write, HostStorage.write = write, write_rows
        for owner, name in ((UndoJournals, "open"), (Path, "unlink"), (UndoJournals, "_read"), (os, "rename")):
            setattr(owner, name, self._before_and_after(getattr(owner, name)))

    def _before_and_after(self, function: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            if self.tick():
                self.explode()
            result = function(*args, **kwargs)
            if self.tick():
                self.explode()
            return result

        return wrapped


def train(folder: Path, prefetch: bool, moment: int) -> None:
    """A little run: resumes from its checkpoint if there is one, checkpoints every third cycle, notes its batches."""
    Bomb(moment).arm()
    replay, feeder, notes = make(folder / "replay", storage="disk", prefetch=prefetch), Feeder(), []
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        feeder.count, feeder.age, notes = saved["count"].numpy(), saved["age"].numpy(), saved["notes"]
        replay.load_state_dict(saved["replay"], folder)
    while len(notes) < 45:
        notes.append([float(value.double().sum()) for value in cycles(replay, feeder, 1)[0].values()])
        if len(notes) % 3 == 0:
            saved = {"count": torch.tensor(feeder.count), "age": torch.tensor(feeder.age), "notes": notes}
            torch.save(saved | {"replay": replay.state_dict(folder)}, folder / "new.pt")
            os.rename(folder / "new.pt", checkpoint)
            replay.committed()
    replay.close()


def in_child(folder: Path, prefetch: bool, moment: int) -> bool:
    """Whether the run came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(folder, prefetch, moment)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


@pytest.mark.parametrize("prefetch", [False, True])
def test_kill_at_any_moment_and_resume(prefetch, tmp_path):
    """Torn journal entries, half-written rows, half-made checkpoints, roll-backs cut off: the same in the end."""
    reference = tmp_path / "reference"
    reference.mkdir()
    assert in_child(reference, prefetch, moment=10**9)
    expected = torch.load(reference / "checkpoint.pt", weights_only=True)["notes"]
    rng, kills = np.random.default_rng(0), 0
    for span in (160, 240, 600, 1500):  # the first die every few cycles, often while going back
        folder = tmp_path / str(span)
        folder.mkdir()
        while not in_child(folder, prefetch, moment=int(rng.integers(1, span))):
            kills += 1
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["notes"] == expected
        shutil.rmtree(folder)
    assert kills > 15


# Damage ---------------------------------------------------------------------------------------------------------------


def test_missing_or_truncated_data_is_a_checkpoint_error(tmp_path):
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 30)
    state = replay.state_dict(tmp_path / "saved")
    file = tmp_path / "saved" / "observation.image.npy"
    os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(CheckpointError, match=r"observation.image.npy: .*cut off"):
        make(tmp_path).load_state_dict(state, tmp_path / "saved")


def test_a_checkpoint_of_another_replay_is_refused(tmp_path):
    replay, feeder = make(tmp_path), Feeder()
    feeder.feed(replay, 30)
    state = replay.state_dict(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"length=80, this run's has 100"):
        make(tmp_path, capacity=300).load_state_dict(state, tmp_path / "saved")
    disk = make(tmp_path / "other", storage="disk")
    with pytest.raises(CheckpointError, match="storage=ram, this run's has disk"):
        disk.load_state_dict(state, tmp_path / "saved")
    disk.close()


def test_a_disk_replay_without_its_files_is_refused(tmp_path):
    """The checkpoint of a disk replay is of use only beside the files of its run."""
    replay, feeder = make(tmp_path / "run", storage="disk"), Feeder()
    cycles(replay, feeder, 5)
    state = replay.state_dict(tmp_path)
    replay.close()
    elsewhere = make(tmp_path / "elsewhere", storage="disk")
    with pytest.raises(CheckpointError, match="in its own directory"):
        elsewhere.load_state_dict(state, tmp_path)
    elsewhere.close()


def test_a_full_disk_under_the_journal_stops_the_run_and_harms_nothing(tmp_path, monkeypatch):
    whole, feeder = make(tmp_path / "whole", storage="disk"), Feeder()
    expected = cycles(whole, feeder, 30)
    whole.close()
    replay, feeder = make(tmp_path / "run", storage="disk"), Feeder()
    cycles(replay, feeder, 20)
    state, counts = replay.state_dict(tmp_path), (feeder.count.copy(), feeder.age.copy())
    replay.committed()
    cycles(replay, feeder, 2)

    def full(file: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DataError, match="No space left on device"):
            cycles(replay, feeder, 5)
    with pytest.raises(DataError, match="No space left on device"):  # what is half written must not be saved
        replay.state_dict(tmp_path)
    replay.close()
    resumed = make(tmp_path / "run", storage="disk")
    resumed.load_state_dict(state, tmp_path)
    feeder.count, feeder.age = counts
    assert_same(cycles(resumed, feeder, 10), expected[20:])
    resumed.close()


def test_a_run_that_starts_over_forgets_what_lies_there(tmp_path):
    """Killed before its first checkpoint, a run begins again in the same directory."""
    replay, feeder = make(tmp_path / "run", storage="disk"), Feeder()
    first = cycles(replay, feeder, 20)
    replay.close()
    again, feeder = make(tmp_path / "run", storage="disk"), Feeder()
    assert len(again) == 0
    assert not again.ready(SPEC)
    assert_same(cycles(again, feeder, 20), first)
    again.close()


def test_journal_grows_only_with_records_that_the_checkpoint_knows(tmp_path):
    """New rows need no entry, and a row that was kept once is not kept again."""
    replay, feeder = make(tmp_path, storage="disk"), Feeder()
    storage = replay._ring.storage
    assert isinstance(storage, DiskStorage)
    feeder.feed(replay, 10)
    replay.state_dict(tmp_path)
    replay.committed()
    journal = max(tmp_path.glob("journal-*"))
    feeder.feed(replay, 10)
    assert len(replay)
    before = journal.stat().st_size
    assert before < 100  # at most the flag that closes an interrupted episode
    ids = torch.arange(6)
    for value in (1.0, 2.0):
        replay.update(ids, {"latent.deter": torch.full((6, 3), value)})
    assert journal.stat().st_size - before == 20 + 6 * (8 + 12)
    replay.close()


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
@pytest.mark.parametrize("steps", [10, 60])  # before and after the ring has wrapped
def test_records_are_dealt_out_to_other_ranks(sampling, steps, tmp_path):
    """Each of four environments keeps its records and their priorities, from two ranks to one and to four."""
    shares, expected, masses = [], [], []
    for rank in range(2):
        replay, feeder = make(tmp_path, capacity=160, num_envs=2, seed=rank, sampling=sampling), Feeder(2)
        feeder.feed(replay, steps + 7 * rank)  # streams of different lengths
        batch = replay.sample(SPEC)
        if sampling == "prioritized":
            replay.update(batch.indices, {"priority": torch.rand(batch.indices.shape)})
        folder = tmp_path / f"saved-{rank}"
        folder.mkdir()
        shares.append((round_trip(replay.state_dict(folder), folder), folder))
        expected += streams_of(replay, 2)
        masses += [] if sampling == "uniform" else list(replay._priorities._masses.reshape(2, -1))
    for count in (1, 4):
        for rank in range(count):
            own = slice(rank * 4 // count, (rank + 1) * 4 // count)
            replay = make(tmp_path, capacity=80 * (4 // count), num_envs=4 // count, seed=9, sampling=sampling)
            replay.load_shares(shares, own)
            assert_same(streams_of(replay, 4 // count), expected[own])
            if sampling == "prioritized":
                np.testing.assert_array_equal(replay._priorities._masses, np.concatenate(masses[own]))
            assert replay.sample(SPEC).reward.shape == (4, 6)


def streams_of(replay: SequenceReplay, num_envs: int) -> list[dict]:
    """All fields of the records of every environment, oldest first."""
    scan = replay.scan(start=0, count=len(replay), fields=list(FIELDS))
    env = scan.indices % num_envs
    return [{name: torch.from_numpy(value[env == n]) for name, value in scan.fields.items()} for n in range(num_envs)]

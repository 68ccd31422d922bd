"""Prefetch changes when work is done, never what comes out."""

from __future__ import annotations

import threading

import pytest
import torch
from replay_helpers import SPEC, Feeder, assert_same, learn, make, round_trip, tensors

from rl_lab.records import BatchSpec


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("replay")]


def run(replay, feeder: Feeder, count: int) -> list[dict]:
    batches = []
    for number in range(count):
        feeder.feed(replay, 5)
        batches.append(tensors(learn(replay)))
        if number % 4 == 3:
            batches.append(tensors(replay.sample(BatchSpec(2, 10))))  # another consumer in between
    return batches


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_batches_do_not_depend_on_timing(storage, tmp_path, monkeypatch):
    """A slow background thread gives the batches of a fast one."""
    results = []
    for folder, delay in (("a", 0.0), ("b", 0.003)):
        replay, feeder = make(tmp_path / folder, storage=storage, prefetch=True), Feeder()
        gather, wait = replay._gatherer.gather, threading.Event()

        def slow(*args, gather=gather, delay=delay, wait=wait):
            wait.wait(delay)
            return gather(*args)

        monkeypatch.setattr(replay._gatherer, "gather", slow)
        results.append(run(replay, feeder, 25))
        replay.close()
    assert_same(*results)
    assert not threads()


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_resume_serves_the_batch_that_was_waiting(storage, tmp_path):
    """Its contents are those of the moment it was gathered, whatever was written back since."""
    whole, feeder = make(tmp_path / "whole", storage=storage, prefetch=True), Feeder()
    expected = run(whole, feeder, 32)
    whole.close()

    replay, feeder = make(tmp_path / "run", storage=storage, prefetch=True), Feeder()
    run(replay, feeder, 20)
    saved = tmp_path / "saved"
    saved.mkdir()
    state = round_trip(replay.state_dict(saved), saved)
    assert len(state["pending"]) == 1
    replay.committed()
    counts = feeder.count.copy(), feeder.age.copy()
    run(replay, feeder, 3)
    replay.close()

    resumed = make(tmp_path / "run", storage=storage, prefetch=True)
    resumed.load_state_dict(state, saved)
    feeder.count, feeder.age = counts
    assert_same(run(resumed, feeder, 12), expected[25:])
    resumed.close()
    assert not threads()


def test_every_online_window_is_still_served_once(tmp_path):
    replay, feeder = make(tmp_path, prefetch=True), Feeder()
    feeder.feed(replay, 70)
    online = int((feeder.count // SPEC.window).sum())
    starts = torch.cat([replay.sample(SPEC).indices[:, 0] for _ in range(online // 4)])
    assert len(starts.unique()) == len(starts)
    assert ((starts // 3) % SPEC.window == 0).all()
    replay.close()


def test_without_prefetch_there_is_no_thread(tmp_path):
    replay, feeder = make(tmp_path), Feeder()  # auto, on the CPU
    run(replay, feeder, 10)
    assert not threads()


def test_an_error_in_the_background_comes_out_at_the_next_sample(tmp_path, monkeypatch):
    replay, feeder = make(tmp_path, prefetch=True), Feeder()
    run(replay, feeder, 6)

    def broken(*args):
        raise OSError("the cable is out")

    monkeypatch.setattr(replay._gatherer, "gather", broken)
    replay.sample(SPEC)  # the one that was waiting
    with pytest.raises(OSError, match="the cable is out"):
        replay.sample(SPEC)
    replay.close()
    assert not threads()

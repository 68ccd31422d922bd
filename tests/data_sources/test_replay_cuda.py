"""Batches on a GPU: through pinned memory, prefetched, or from records that lie there."""

from __future__ import annotations

import pytest
import torch
from replay_helpers import FIELDS, Feeder, assert_same, learn, tensors

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.records import BatchSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SPEC = BatchSpec(batch_size=4, sequence_length=5, context=1, device="cuda")


def make(folder, **settings) -> SequenceReplay:
    replay = SequenceReplay(capacity=240, **settings)
    replay.prepare(SourceContext(FIELDS, 3, "cuda", 0, folder))
    return replay


def run(replay: SequenceReplay, spec: BatchSpec, count: int = 30) -> list[dict]:
    feeder, batches = Feeder(), []
    for _ in range(count):
        feeder.feed(replay, 6)
        batches.append({name: tensor.cpu() for name, tensor in tensors(learn(replay, spec)).items()})
    replay.close()
    return batches


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_batches_on_the_gpu_equal_those_on_the_cpu(storage, prefetch, tmp_path):
    cpu = run(make(tmp_path / "cpu", storage=storage, prefetch=prefetch), BatchSpec(4, 5, 1))
    gpu = run(make(tmp_path / "gpu", storage=storage, prefetch=prefetch), SPEC)
    assert_same(cpu, gpu)


def test_records_on_the_gpu_give_the_same_batches(tmp_path):
    assert_same(
        run(make(tmp_path, prefetch=False), BatchSpec(4, 5, 1), 12), run(make(tmp_path, storage="gpu"), SPEC, 12)
    )


def test_sampling_and_writing_back_never_wait_for_the_gpu(tmp_path):
    """With the records on the GPU, and with prefetch from RAM."""
    for settings in ({"storage": "gpu"}, {"prefetch": True}):
        replay, feeder = make(tmp_path, **settings), Feeder()
        feeder.feed(replay, 60)
        learn(replay, SPEC)
        learn(replay, SPEC)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                feeder.feed(replay, 1)
                learn(replay, SPEC)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        replay.close()


def test_a_prefetched_batch_on_the_gpu_is_saved_and_restored(tmp_path):
    replay, feeder = make(tmp_path, prefetch=True), Feeder()
    feeder.feed(replay, 60)
    for _ in range(3):
        learn(replay, SPEC)
    state = replay.state_dict(tmp_path / "saved")
    assert all(not tensor.is_cuda for tensor in state["pending"][0]["tensors"].values())
    restored = make(tmp_path, prefetch=True)
    restored.load_state_dict(state, tmp_path / "saved")
    assert_same([replay.sample(SPEC) for _ in range(3)], [restored.sample(SPEC) for _ in range(3)])
    assert restored.sample(SPEC).reward.is_cuda
    replay.close()
    restored.close()

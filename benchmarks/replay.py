"""Speed and memory of the replay, against what the machine can do, measured in the same run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.records import BatchSpec, FieldSpec, RecordBlock

FLAGS = {name: FieldSpec((), "bool") for name in ("is_first", "is_last", "is_terminal")}
COMMON = {"action": FieldSpec((1,), "int32"), "reward": FieldSpec((), "float32"), **FLAGS}
IMAGE_FIELDS = {"observation.image": FieldSpec((64, 64, 3), "uint8"), **COMMON}
VECTOR_FIELDS = {
    "observation.vector": FieldSpec((24,), "float32"),
    **COMMON,
    "latent.deter": FieldSpec((64,), "float32"),
    "latent.stoch": FieldSpec((8, 8), "float32"),
}


def measure_sampling(records: int = 100_000, rounds: int = 30) -> dict[str, float]:
    """16 × 64 images of 64×64×3 out of `records`: the replay, a plain copy of as many bytes, NumPy's index."""
    replay, image = _make(IMAGE_FIELDS, records, 1), IMAGE_FIELDS["observation.image"]
    rng, before = np.random.default_rng(0), _resident_bytes()
    frames = rng.integers(0, 255, (256, *image.shape), np.uint8)
    for step in range(records):
        block = {name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in COMMON.items()}
        replay.add(RecordBlock({"observation.image": frames[step % 256][None].copy(), **block}))
    raw = len(replay) * sum(np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape)) for spec in IMAGE_FIELDS.values())
    resident = _resident_bytes() - before
    spec = BatchSpec(batch_size=16, sequence_length=64, fields=("observation.image",))
    stored = replay._ring.storage.read_range("observation.image", 0, records)
    size = 16 * 64 * int(np.prod(image.shape))
    source, target = stored.reshape(-1), np.empty(size, np.uint8)

    def copy() -> None:
        start = int(rng.integers(0, len(source) - size))
        np.copyto(target, source[start : start + size])

    def fancy() -> None:
        starts = rng.integers(0, records - 64, 16)
        _ = stored[starts[:, None] + np.arange(64)]

    def sample() -> None:
        replay.sample(spec)

    seconds = _alternate([copy, sample, fancy], rounds)
    rates = [size / value / 1e9 for value in seconds]
    return {
        "memcpy_gb_per_s": rates[0],
        "sample_gb_per_s": rates[1],
        "fancy_index_gb_per_s": rates[2],
        "sample_ms": seconds[1] * 1e3,
        "sample_of_memcpy": rates[1] / rates[0],
        "memory_of_raw": resident / raw,
        "allocated_of_raw": replay.memory()["ram"] / raw,
    }


def measure_adding(num_envs: int = 8, steps: int = 20_000) -> dict[str, float]:
    """Vector observations, two latents, and an episode's end every 20 steps of each environment."""
    replay = _make(VECTOR_FIELDS, 100_000, num_envs)
    spent, stretches = 0.0, []
    for step in range(steps):
        fields = {name: np.zeros((num_envs, *spec.shape), spec.dtype) for name, spec in VECTOR_FIELDS.items()}
        blocks = [RecordBlock(fields)]
        if step % 5 == 0:  # two of eight environments
            ended = np.array([step // 5 % num_envs, (step // 5 + 1) % num_envs])
            blocks.append(
                RecordBlock({name: fields[name][:2].copy() for name in ("observation.vector", "reward")}, ended)
            )
        start = time.perf_counter()
        for block in blocks:
            replay.add(block)
        spent += time.perf_counter() - start
        if step % 1000 == 999:
            stretches.append(spent / 1000)
            spent = 0.0
    each = float(np.quantile(stretches, 0.25))  # the first lap of the ring takes memory; other load may come in between
    return {"add_env_steps_per_s": num_envs / each, "add_us_per_vector_step": each * 1e6}


def measure_priorities(records: int = 1_000_000, batch: int = 256, rounds: int = 200) -> dict[str, float]:
    """Draws by priority, and new priorities, through the replay with a million records."""
    replay = SequenceReplay(capacity=records, sampling="prioritized")
    replay.prepare(SourceContext(COMMON, 8, "cpu", 0, Path(tempfile.gettempdir())))
    block = {name: np.zeros((8, *spec.shape), spec.dtype) for name, spec in COMMON.items()}
    for _ in range(records // 8):
        replay.add(RecordBlock(dict(block)))
    spec, rng = BatchSpec(batch_size=batch, sequence_length=2), np.random.default_rng(0)
    replay.sample(spec)
    ids, priorities = rng.integers(0, records, (rounds, batch)), rng.random((rounds, batch))
    start = time.process_time()
    for row, values in zip(ids, priorities, strict=True):
        replay.update(row, {"priority": values})
    updating = time.process_time() - start
    start = time.process_time()
    for _ in range(rounds):
        replay.sample(spec)
    sampling = time.process_time() - start
    count = rounds * batch
    return {"priority_updates_per_s": count / updating, "priority_draws_per_s": count / sampling}


def measure() -> dict[str, float]:
    return measure_sampling() | measure_adding() | measure_priorities()


def _make(fields: dict[str, FieldSpec], capacity: int, num_envs: int) -> SequenceReplay:
    replay = SequenceReplay(capacity=capacity)
    replay.prepare(SourceContext(fields, num_envs, "cpu", 0, Path(tempfile.gettempdir())))
    return replay


def _alternate(functions: list[Callable[[], None]], rounds: int) -> list[float]:
    """Best seconds of each, a few calls of one after a few of the other: other load on the machine meets them alike."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for position, function in enumerate(functions):
            for _ in range(5):
                start = time.perf_counter()
                function()
                best[position] = min(best[position], time.perf_counter() - start)
    return best


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    rows = {
        "replay sampling, 16 × 64 of 64×64×3": ("sample_gb_per_s", "GB/s"),
        "  memcpy, same bytes": ("memcpy_gb_per_s", "GB/s"),
        "  numpy fancy index": ("fancy_index_gb_per_s", "GB/s"),
        "  sampling / memcpy (aim ≥ 0.8)": ("sample_of_memcpy", ""),
        "adding, 8 environments (aim ≥ 50,000)": ("add_env_steps_per_s", "env steps/s"),
        "  time of an add": ("add_us_per_vector_step", "µs/vector step"),
        "memory / raw bytes (aim ≤ 1.05)": ("memory_of_raw", ""),
        "new priorities of 1M (aim ≥ 200,000)": ("priority_updates_per_s", "/s"),
        "  draws by priority, gathered": ("priority_draws_per_s", "/s"),
    }
    figures = measure()
    for label, (name, unit) in rows.items():
        print(f"{label:<40} {figures[name]:>12,.2f} {unit}")


if __name__ == "__main__":
    main()

"""How fast an offline source draws image sequences from a dataset larger than its memory, and how much memory it takes.

    python benchmarks/offline_streaming.py --gigabytes 10 --folder /tmp/streaming

Writes a dataset folder of synthetic pictures, draws batches from all of it, and compares with memcpy of as many random
windows of the same file into memory of the same kind (the pool that batches come from):

- out of a mapping of the whole file, every page of it touched before, so that no page fault is left. The process then
  holds the whole file: this is what a source could do if its memory did not have to stay small;
- out of a mapping that gives each window's pages back, so that the process stays as small as with the source;
- out of the process's own memory, 1 GB of it.

Beside the copy, a source draws the windows, gathers the small fields and makes tensors. The dataset is removed at the
end. Writes results/speed/offline_streaming.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gymnasium import spaces
from measuring import write_record

from rl_lab.buffers.batches import ArrayPool
from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.offline import OfflineSource
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import write_dataset
from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.records import BatchSpec, FieldSpec

SHAPE = (64, 64, 3)
LENGTH = 1000  # decisions of an episode
ROW_BYTES = int(np.prod(SHAPE))
MEMORY_ROWS = 80_000  # pictures in the process's own memory: 1 GB, far more than a cache holds
SPEC = BatchSpec(16, 64)
BATCH_BYTES = SPEC.batch_size * SPEC.window * ROW_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rl_lab_streaming"))
    parser.add_argument("--batches", type=int, default=300)
    options = parser.parse_args()
    episodes = max(1, round(options.gigabytes * 1e9 / ((LENGTH + 1) * ROW_BYTES)))
    path = options.folder / "pictures"
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        started = time.perf_counter()
        write_dataset(path, pictures(episodes), Attributes())
        written = time.perf_counter() - started
        figures = {"episodes": episodes, "write_s": round(written, 1), **measure(path, options)}
        print(json.dumps(figures, indent=1))
        write_record("offline_streaming", {"machine": platform.machine(), **figures})
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


def pictures(count: int) -> Iterator[Episode]:
    noise = np.random.default_rng(0).integers(0, 256, (LENGTH + 1, *SHAPE), dtype=np.uint8)
    for number in range(count):
        image = noise + np.uint8(number % 251)
        yield Episode({"image": image}, np.zeros((LENGTH, 1), np.float32), np.zeros(LENGTH, np.float32), False)


def measure(path: Path, options: argparse.Namespace) -> dict[str, float]:
    adapter = SpaceAdapter(
        spaces.Box(0, 255, SHAPE, np.uint8), spaces.Box(-1, 1, (1,)), EnvironmentSettings(id="Pictures-v0")
    )
    fields = {"observation.image": FieldSpec(SHAPE, "uint8"), "action": FieldSpec((1,), "float32")}
    fields |= {"reward": FieldSpec((), "float32")}
    fields |= dict.fromkeys(("is_first", "is_last", "is_terminal"), FieldSpec((), "bool"))
    source = OfflineSource(path=str(path), memory="disk")
    source.prepare(SourceContext(fields, 1, "cpu", 0, options.folder / "run", actions=adapter.action_converter))
    first = rate(lambda: source.sample(SPEC), options.batches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    memory = np.random.default_rng(1).integers(0, 256, (MEMORY_ROWS, *SHAPE), dtype=np.uint8)
    touched, bounded = (mapped(path / "observation.image.rows") for _ in range(2))
    rows_of(touched).reshape(-1)[:: mmap.PAGESIZE].max()
    jobs: dict[str, Callable[[], object]] = {
        "sample": lambda: source.sample(SPEC),
        "page_cache": lambda: copy_windows(rows_of(touched)),
        "bounded_page_cache": lambda: copy_windows(rows_of(bounded), give_back=bounded),
        "memory": lambda: copy_windows(memory),
    }
    rounds = [{name: rate(job, 20) for name, job in jobs.items()} for _ in range(max(1, options.batches // 20))]
    source.close()
    medians = {name: float(np.median([entry[name] for entry in rounds])) for name in jobs}
    shares = {name: float(np.median([entry["sample"] / entry[name] for entry in rounds])) for name in jobs}
    return {
        "gigabytes": round(len(source) * ROW_BYTES / 1e9, 2), "first_pass_gb_per_s": round(first, 2),
        **{f"{name}_gb_per_s": round(value, 2) for name, value in medians.items()},
        **{f"share_of_{name}": round(value, 3) for name, value in shares.items() if name != "sample"},
        "peak_rss_gb": round(peak, 3),
    }  # fmt: skip


POOL = ArrayPool()
DRAWS = np.random.default_rng(2)


def copy_windows(rows: np.ndarray, give_back: mmap.mmap | None = None) -> None:
    """memcpy of random windows into a batch. `give_back`: the mapping of the rows, whose pages are not to be kept."""
    out = POOL.take((SPEC.batch_size, SPEC.window, *SHAPE), "uint8")
    for window, start in enumerate(DRAWS.integers(0, len(rows) - SPEC.window, SPEC.batch_size).tolist()):
        np.copyto(out[window], rows[start : start + SPEC.window])
        if give_back is not None:
            first = start * ROW_BYTES // mmap.PAGESIZE * mmap.PAGESIZE
            give_back.madvise(mmap.MADV_DONTNEED, first, (start + SPEC.window) * ROW_BYTES - first)


def mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def rows_of(mapping: mmap.mmap) -> np.ndarray:
    return np.frombuffer(mapping, np.uint8).reshape(-1, *SHAPE)


def rate(job: Callable[[], object], count: int) -> float:
    """GB per second of this process, so that others on the machine do not count."""
    started = time.process_time()
    for _ in range(count):
        job()
    return count * BATCH_BYTES / (time.process_time() - started) / 1e9


if __name__ == "__main__":
    main()

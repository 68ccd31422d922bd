"""How fast an offline source draws image sequences from a dataset larger than its memory, and how much memory it takes.

    python benchmarks/offline_streaming.py --gigabytes 10 --folder /tmp/streaming

Writes a dataset folder of synthetic pictures, draws batches from all of it, and compares with memcpy of as many random
windows into the same kind of batch: out of the page cache (a mapping of a part of the same file, every page of it
touched before, so that no page fault is left), and out of the process's own memory. Beside the copy, a source draws the
windows, gathers the small fields and makes tensors; it keeps no mapping, so that its memory stays small. The dataset is
removed at the end. Writes results/speed/offline_streaming.json.
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

from rl_lab.data_sources.base import SourceContext
from rl_lab.data_sources.offline import OfflineSource
from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import write_dataset
from rl_lab.environments.adapter import SpaceAdapter
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.records import BatchSpec, FieldSpec

SHAPE = (64, 64, 3)
LENGTH = 1000  # decisions of an episode
MEMORY_ROWS = 80_000  # pictures that memcpy reads from: 1 GB, far more than a cache holds
SPEC = BatchSpec(16, 64)
BATCH_BYTES = SPEC.batch_size * SPEC.window * int(np.prod(SHAPE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rl_lab_streaming"))
    parser.add_argument("--batches", type=int, default=300)
    options = parser.parse_args()
    episodes = max(1, round(options.gigabytes * 1e9 / ((LENGTH + 1) * np.prod(SHAPE))))
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
    mapped = mapped_rows(path / "observation.image.rows")
    jobs: dict[str, Callable[[], object]] = {
        "sample": lambda: source.sample(SPEC),
        "page_cache": lambda: copy_windows(mapped),
        "memory": lambda: copy_windows(memory),
    }
    rounds = [{name: rate(job, 20) for name, job in jobs.items()} for _ in range(max(1, options.batches // 20))]
    source.close()
    medians = {name: float(np.median([entry[name] for entry in rounds])) for name in jobs}
    return {
        "gigabytes": round(len(source) * float(np.prod(SHAPE)) / 1e9, 2), "first_pass_gb_per_s": round(first, 2),
        **{f"{name}_gb_per_s": round(value, 2) for name, value in medians.items()},
        "share_of_page_cache": round(float(np.median([entry["sample"] / entry["page_cache"] for entry in rounds])), 3),
        "share_of_memory": round(float(np.median([entry["sample"] / entry["memory"] for entry in rounds])), 3),
        "peak_rss_gb": round(peak, 3),
    }  # fmt: skip


OUTPUTS = np.ones((4, SPEC.batch_size, SPEC.window, *SHAPE), np.uint8)
DRAWS = np.random.default_rng(2)


def copy_windows(rows: np.ndarray) -> None:
    """memcpy of random windows, into one of four batches."""
    out = OUTPUTS[DRAWS.integers(4)]
    for window, start in enumerate(DRAWS.integers(0, len(rows) - SPEC.window, SPEC.batch_size).tolist()):
        np.copyto(out[window], rows[start : start + SPEC.window])


def mapped_rows(path: Path) -> np.ndarray:
    """The first rows of a file as a mapping of the page cache, every page touched."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), MEMORY_ROWS * int(np.prod(SHAPE)), prot=mmap.PROT_READ)
    rows = np.frombuffer(mapping, np.uint8)
    rows[:: mmap.PAGESIZE].max()
    return rows.reshape(MEMORY_ROWS, *SHAPE)


def rate(job: Callable[[], object], count: int) -> float:
    """GB per second of this process, so that others on the machine do not count."""
    started = time.process_time()
    for _ in range(count):
        job()
    return count * BATCH_BYTES / (time.process_time() - started) / 1e9


if __name__ == "__main__":
    main()

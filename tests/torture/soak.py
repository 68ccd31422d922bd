"""A long training whose memory, handles and threads are watched: they must be flat.

    python -m tests.torture.soak --minutes 60
    python -m tests.torture.soak --minutes 20 --device cuda +experiment=dreamer_v3 environment.id=CartPole-v1 size=1m

Without overrides a very small Dreamer trains, with evaluations and checkpoints every few seconds. Writes
results/soak/<device>.json from a clean commit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from tests.torture.cases import BASE, DREAMER

from rl_lab.metrics.run_files import read_run
from rl_lab.orchestration.files import to_json, write_atomic
from rl_lab.orchestration.run_directory import git_commit, timestamp, versions

RESULTS = Path(__file__).resolve().parents[2] / "results" / "soak"
EVERY_S = 5.0
SETTLED = 0.3  # of the samples come before the run is settled: caches fill, the replay grows to its capacity
SMALL = (
    *DREAMER, "data_sources.replay.capacity=2000", "checkpoint.every=2000", "evaluation.every=1000",
    "logging.every=500", "environment.backend=process",
)  # fmt: skip
QUIET = [line for line in BASE if line.startswith(("logging.console", "logging.tensorboard", "evaluation.video"))]
# A phase that lasts for the whole budget lasts for as long as the soak does.
ENDLESS = "training.total_timesteps=100_000_000"


class Sample(NamedTuple):
    """The memory, handles and threads that the training process and its workers hold at one moment."""

    time_s: float
    rss: int
    handles: int
    threads: int
    gpu_mib: float


def soak(minutes: float, device: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Train for so long; the first and last of what the process held, and the slope of its memory."""
    root = tempfile.mkdtemp(prefix="rl-lab-soak-")
    chosen = [*(overrides or (*SMALL, *BASE[3:8])), *QUIET, ENDLESS, f"experiment.device={device}", f"run_root={root}"]
    log = Path(root, "output.txt")
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "rl_lab", "train", *chosen], stdout=output, stderr=output)
    samples = _watched(process, minutes)
    ended_early = process.poll() is not None
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=300)
    if ended_early:
        raise SystemExit(f"The training ended by itself, with code {code}: {log.read_text()[-2000:]}")
    run = read_run(next(Path(root).glob("*/*/run.json")).parent)
    if not run.rows:
        raise SystemExit("No row of metrics was written: give it more --minutes.")
    result = {
        "overrides": [line for line in chosen if not line.startswith("run_root")],
        "env_steps": int(run.rows[-1]["env_steps"]),
        "updates": int(run.rows[-1]["updates"]),
        "evaluations": sum("eval/return_mean" in row for row in run.rows),
        "restarted_workers": sum(event.get("kind") == "worker_restart" for event in run.events),
        "exit_code": code,
        **_flatness(samples),
    }
    shutil.rmtree(root, ignore_errors=True)
    return result


def _watched(process: subprocess.Popen[bytes], minutes: float) -> list[Sample]:
    watched, samples = psutil.Process(process.pid), []
    start = time.monotonic()
    while time.monotonic() < start + 60 * minutes and process.poll() is None:
        try:
            family = [watched, *watched.children(recursive=True)]
            parts = [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in family]
        except psutil.Error:  # a worker that ended in between
            continue
        rss, handles, threads = map(sum, zip(*parts, strict=True))
        samples.append(Sample(time.monotonic() - start, rss, handles, threads, _gpu_mib()))
        time.sleep(EVERY_S)
    return samples


def _gpu_mib() -> float:
    """Memory in use on the first GPU; 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    if shutil.which(command[0]) is None:
        return 0.0
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return float(done.stdout.strip()) if done.returncode == 0 else 0.0


def _flatness(samples: Sequence[Sample]) -> dict[str, Any]:
    """The settled part: its first and last tenth (medians, for evaluations come and go), the slope by least squares."""
    values = np.array(samples[int(SETTLED * len(samples)) :], np.float64)
    tenth, hours = max(1, len(values) // 10), values[:, 0] / 3600
    flatness: dict[str, Any] = {"samples": len(samples)}
    columns = [values[:, 1] / 2**20, *values[:, 2:].T]
    for name, column in zip(("rss_mib", "handles", "threads", "gpu_mib"), columns, strict=True):
        ends = [round(float(np.median(part)), 1) for part in (column[:tenth], column[-tenth:])]
        slope = round(float(np.polyfit(hours, column, 1)[0]), 2)
        flatness[name] = {"first": ends[0], "last": ends[1], "per_hour": slope, "highest": round(column.max(), 1)}
    return flatness


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of the run; default: a very small Dreamer")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="default: results/soak/<device>.json")
    options = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    commit = git_commit()
    measured = soak(options.minutes, options.device, options.overrides)
    head = {"commit": commit, "time": timestamp(), "minutes": options.minutes, "versions": versions()}
    text = to_json(head | measured)
    if str(commit).endswith("-dirty") and options.out is None:
        sys.stdout.write(f"{text}Not written: results come from a clean commit.\n")
        return
    target = options.out or RESULTS / f"{options.device}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text)
    sys.stdout.write(f"{text}{target}\n")


if __name__ == "__main__":
    main()

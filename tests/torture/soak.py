"""A long training whose memory, handles and threads are watched: they must be flat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.torture.cases import BASE, DREAMER

EVERY_S = 5.0
SETTLED = 0.3  # of the samples come before the run is settled: caches fill, the replay grows to its capacity


def soak(minutes: float) -> dict[str, Any]:
    """Train for so long, with evaluations and checkpoints under way; the slopes of what the process holds."""
    root = tempfile.mkdtemp(prefix="rl-lab-soak-")
    overrides = [
        *DREAMER, *BASE, "data_sources.replay.capacity=2000", "training.total_timesteps=100_000_000",
        "checkpoint.every=2000", "evaluation.every=1000", "logging.every=500", f"run_root={root}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rl_lab", "train", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
    watched, samples = psutil.Process(process.pid), []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and process.poll() is None:
        samples.append((time.monotonic(), watched.memory_info().rss, watched.num_fds(), watched.num_threads()))
        time.sleep(EVERY_S)
    ended_early = process.poll() is not None
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=300)
    lines = sum(1 for path in Path(root).glob("*/*/metrics.jsonl") for _ in path.open())
    settled = np.array(samples[int(SETTLED * len(samples)) :], np.float64)
    hours = (settled[:, 0] - settled[0, 0]) / 3600
    growth = float(np.polyfit(hours, settled[:, 1] / 2**20, 1)[0]) if len(settled) > 2 else float("nan")
    return {
        "minutes": minutes,
        "samples": len(samples),
        "rows": lines,
        "ended_early": ended_early,
        "exit_code": code,
        "rss_mib_first": round(settled[0, 1] / 2**20, 1),
        "rss_mib_last": round(settled[-1, 1] / 2**20, 1),
        "rss_mib_per_hour": round(growth, 2),
        "handles": [int(settled[:, 2].min()), int(settled[:, 2].max())],
        "threads": [int(settled[:, 3].min()), int(settled[:, 3].max())],
    }

"""Many processes that ask for one run's lock at the same moment. Run as a program, it forks before torch is loaded."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl_lab.orchestration.run_lock import RunLockedError, run_lock

ROOT = Path(__file__).resolve().parents[2]


def contend(folder: Path, *, processes: int, rounds: int) -> list[int]:
    """How many held the lock at once in each round: 1 is right."""
    command = [sys.executable, "-m", "tests.torture.locks", str(folder), str(processes), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    holders: list[int] = json.loads(done.stdout)
    return holders


def _contender(folder: Path, rounds: int, barrier: Any, holders: Any) -> None:
    for number in range(rounds):
        barrier.wait()
        try:
            with run_lock(folder):
                with holders.get_lock():
                    holders[number] += 1
                barrier.wait()  # everybody has tried
        except RunLockedError:
            barrier.wait()


def main(folder: Path, processes: int, rounds: int) -> list[int]:
    context = multiprocessing.get_context("fork")
    barrier, holders = context.Barrier(processes), context.Array("i", rounds)
    workers = [context.Process(target=_contender, args=(folder, rounds, barrier, holders)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return list(holders)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))) + "\n")

"""Commands of `rl-lab` in processes of their own, several at once, each with a log file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_lab.errors import MESSAGE_PREFIX

POLL_S = 0.2
GRACE_S = 300.0  # for an interrupted training to write its checkpoint


@dataclass(frozen=True)
class Job:
    """One command: what it is called, its arguments, and the file that takes its output."""

    name: str
    arguments: Sequence[str]
    log: Path


@dataclass(frozen=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float


def run_jobs(jobs: Sequence[Job], *, at_once: int, say: Callable[[str], object]) -> list[str]:
    """Run all; one sentence for each that failed. Interrupted, the children are told and waited for."""
    waiting, running, failed = list(jobs), list[_Running](), list[str]()
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.pop(0), say))
            time.sleep(POLL_S)
            for entry in [entry for entry in running if entry.process.poll() is not None]:
                running.remove(entry)
                seconds = time.monotonic() - entry.started
                if entry.process.returncode:
                    failed.append(how_it_failed(entry.job, entry.process.returncode))
                    say(failed[-1])
                else:
                    say(f"{entry.job.name} done in {seconds:.0f} s")
    except KeyboardInterrupt:
        _stop(running)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return failed


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _start(job: Job, say: Callable[[str], object]) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "wb") as output, open(_errors(job), "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_lab", *job.arguments],
            stdout=output,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # a terminal's Ctrl-C goes to this process alone, which passes it on once
        )
    say(f"{job.name} started, see {job.log}")
    return _Running(job, process, time.monotonic())


def _errors(job: Job) -> Path:
    return job.log.with_suffix(".err")


def how_it_failed(job: Job, status: int) -> str:
    """One sentence on a process that ended with a status other than 0; below 0 it is the signal that killed it."""
    if status < 0:
        return f"{job.name} was killed by {signal.Signals(-status).name}, see {job.log}"
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return f"{job.name} was interrupted; the same command goes on with it"
    lines = _errors(job).read_text(errors="replace").strip().splitlines()
    own = [line.removeprefix(MESSAGE_PREFIX) for line in lines if line.startswith(MESSAGE_PREFIX)]
    told = own or lines or [f"no message, see {job.log}"]  # a library's warnings may stand after our own
    return f"{job.name} failed: {told[-1]}"


def _stop(running: Sequence[_Running]) -> None:
    """Tell the children once, and give them the time to write a checkpoint."""
    for entry in running:
        if entry.process.poll() is None:
            entry.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for entry in running:
        try:
            entry.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            entry.process.kill()

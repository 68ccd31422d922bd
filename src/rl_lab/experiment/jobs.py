"""Commands of `rl-lab` in processes of their own, several at once, each with a log file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_lab.errors import MESSAGE_PREFIX

POLL_S = 0.2
GRACE_S = 300.0  # for an interrupted training to write its checkpoint


@dataclass(frozen=True)
class Job:
    """One command: what it is called, its arguments, and the file that takes its output."""

    name: str
    arguments: Sequence[str]
    log: Path


class Work(Protocol):
    """A job that an engine has started."""

    def poll(self) -> int | None:
        """Its exit status, once it has ended; below 0 the signal that killed it."""

    def stop(self, deadline: float) -> None:
        """Tell it to save and end, and wait for that until the deadline (of `time.monotonic`)."""


Start = Callable[[Job], Work]


@dataclass(frozen=True)
class _Running:
    job: Job
    work: Work
    started: float


def run_jobs(
    jobs: Sequence[Job], *, at_once: int, say: Callable[[str], object], start: Start | None = None
) -> list[str]:
    """Run all; one sentence for each that failed. Interrupted, the children are told and waited for. `start` is the
    engine that runs them (`rl_lab.experiment.engines`); without one they are processes of this machine."""
    start = start or Process
    waiting, running, failed = list(jobs), list[_Running](), list[str]()
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                job.log.parent.mkdir(parents=True, exist_ok=True)
                running.append(_Running(job, start(job), time.monotonic()))
                say(f"{job.name} started, see {job.log}")
            time.sleep(POLL_S)
            for entry in list(running):
                status = entry.work.poll()
                if status is None:
                    continue
                running.remove(entry)
                seconds = time.monotonic() - entry.started
                if status:
                    failed.append(how_it_failed(entry.job, status))
                    say(failed[-1])
                else:
                    say(f"{entry.job.name} done in {seconds:.0f} s")
    except KeyboardInterrupt:
        deadline = time.monotonic() + GRACE_S
        for entry in running:
            entry.work.stop(deadline)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return failed


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class Process:
    """A job as a process of this machine."""

    def __init__(self, job: Job) -> None:
        with open(job.log, "wb") as output, open(_errors(job), "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl_lab", *job.arguments],
                stdout=output,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # a terminal's Ctrl-C goes to this process alone, which passes it on once
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def tell(self) -> None:
        """Ask it to save and end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def stop(self, deadline: float) -> None:
        self.tell()
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()


def run_here(job: Job) -> int:
    """Run one job to its end, as an engine's worker does; its exit status. SIGTERM is passed on to it."""
    process = Process(job)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: process.tell())
    while process.poll() is None:
        time.sleep(POLL_S)
    return process.poll() or 0


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

"""Runs that are killed, interrupted or starved of disk, and resumed: each must equal the run that was left alone."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.torture.cases import Result, checkpoints_in, folder_in, go_on, info, result_of, train
from tests.torture.children import in_child
from tests.torture.tally import Tally

from rl_lab.errors import CheckpointError
from rl_lab.orchestration.checkpoint import BEST, MANIFEST, CheckpointManager
from rl_lab.orchestration.files import read_json

INJECTED = ("rename", "replace", "fsync", "mkdir", "link", "symlink", "unlink", "rmdir")
ATTEMPTS = 40  # resumes of one run before the campaign gives it up
_whole: dict[str, Result] = {}
_seconds: dict[str, float] = {}


def whole(case: str) -> Result:
    """The result of the case's run that was left alone; it is trained once."""
    if case not in _whole:
        with folder() as root:
            ended = in_child(lambda: str(train(case, root)), limit=600)
            if ended.status != "done":
                raise RuntimeError(f"{case}: the run that nobody touched ended as {ended.status}: {ended.text}")
            _whole[case], _seconds[case] = result_of(Path(ended.value)), ended.seconds
    return _whole[case]


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rl-lab-torture-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def killed_at_random(case: str, kills: int, chance: random.Random, tally: Tally, number: int = signal.SIGKILL) -> None:
    """Kill one run again and again, each time at a random moment of what is left, then let it end and compare."""
    expected = whole(case)
    with folder() as root:
        for _ in range(kills):
            run = folder_in(root)
            after = chance.uniform(0.0, 0.9 * _seconds[case])
            ended = in_child(_start(case, root, run), limit=600, number=number, after=after)
            if ended.status == "done" and ended.value != 128 + number:
                break  # it was quicker
            tally.add("kills" if number == signal.SIGKILL else "signals")
            _check_interrupted(case, root, number, tally)
            check_checkpoints(case, folder_in(root), tally)
        _finish_and_compare(case, root, expected, tally)


def _start(case: str, root: Path, run: Path | None) -> Callable[[], Any]:
    return (lambda: go_on(run)) if run is not None else (lambda: (train(case, root), 0)[1])


def _check_interrupted(case: str, root: Path, number: int, tally: Tally) -> None:
    """A signal that can be heard is told in run.json."""
    run = folder_in(root)
    if number != signal.SIGKILL and run is not None and info(run)["status"] not in ("interrupted", "completed"):
        tally.bad(f"{case}: run.json says {info(run)['status']} after signal {number}")


def check_checkpoints(case: str, run: Path | None, tally: Tally) -> None:
    """Whatever has the name of a checkpoint is whole, at every moment."""
    for path in checkpoints_in(run) if run is not None else []:
        manager = CheckpointManager(path.parent, workflow=(read_json(path / MANIFEST) or {}).get("workflow", ""))
        try:
            manager.load(path, agent_only=path.name == BEST)
        except CheckpointError as error:
            tally.bad(f"{case}: a checkpoint that was left behind cannot be read: {error}")
        tally.add("checkpoints_read")


def killed_at_call(case: str, name: str, count: int, tally: Tally) -> bool:
    """Kill a run just before its `count`-th call of an operation on files, and let it end; False: it made fewer."""
    expected = whole(case)

    def work() -> str:
        original, left = getattr(os, name), [count]

        def counted(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, name, counted)
        return str(train(case, root))

    with folder() as root:
        ended = in_child(work, limit=600)
        if ended.status == "done":
            return False
        tally.add("kills")
        tally.add("kills_at_file_operations")
        _finish_and_compare(case, root, expected, tally)
    return True


def starved(case: str, size: int, tally: Tally) -> None:
    """No file may grow beyond `size` bytes, as on a disk that is full; then there is room again."""
    expected = whole(case)

    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return str(train(case, root))

    with folder() as root:
        ended = in_child(work, limit=600)
        tally.add("full_disks")
        run = folder_in(root)
        if ended.status in ("traceback", "hung"):
            tally.bad(f"{case}: with {size} bytes a file: {ended.text}")
        if run is not None and ended.status == "refused" and info(run)["status"] != "failed":
            tally.bad(f"{case}: run.json says {info(run)['status']} after a full disk")
        _finish_and_compare(case, root, expected, tally)


def _finish_and_compare(case: str, root: Path, expected: Result, tally: Tally) -> None:
    for _ in range(ATTEMPTS):
        run = folder_in(root)
        check_checkpoints(case, run, tally)
        ended = in_child(_start(case, root, run), limit=600)
        run = folder_in(root)
        if ended.status == "done" and ended.value == 0 and run is not None:
            tally.add("comparisons")
            result = result_of(run)
            if result.rows != expected.rows:
                tally.bad(f"{case}: the resumed run differs from the one that was left alone")
            if result.weights != expected.weights:
                tally.bad(f"{case}: the resumed run ends with other weights than the one that was left alone")
            if info(run)["status"] != "completed":
                tally.bad(f"{case}: run.json says {info(run)['status']} at the end")
            return
        if ended.status != "killed":
            tally.bad(f"{case}: going on ended as {ended.status}: {ended.text}")
            return
    tally.bad(f"{case}: not at its end after {ATTEMPTS} resumes")

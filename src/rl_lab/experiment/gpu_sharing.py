"""Several processes on one GPU at once: NVIDIA's multi-process service (MPS), for as long as they run.

Without it processes take turns on a GPU, however little of it each one uses. With it their kernels run side by side.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30.0  # for the daemon to start, or to end


@contextmanager
def shared_gpu(*, say: Callable[[str], object]) -> Iterator[None]:
    """CUDA processes that are started within the block share the GPU by MPS.

    An MPS daemon of the user's own (CUDA_MPS_PIPE_DIRECTORY is set) is left as it is. Where MPS is missing or does not
    start, the processes take turns; `say` is told why.
    """
    if PIPES in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rl-lab-mps-") as folder:
        own = {PIPES: str(Path(folder, "pipes")), LOGS: str(Path(folder, "logs"))}
        for directory in own.values():
            os.mkdir(directory)
        problem = _control({**os.environ, **own}, "-d")
        if problem is not None:
            say(f"The seeds take turns on the GPU, because NVIDIA's MPS did not start: {problem}")
            yield
            return
        os.environ.update(own)
        try:
            yield
        finally:
            _control(dict(os.environ), commands="quit\n")
            for name in own:
                del os.environ[name]


def _control(environment: dict[str, str], *arguments: str, commands: str = "") -> str | None:
    """Run the control program; where it fails, what it says."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    with tempfile.TemporaryFile("w+") as output:  # not a pipe: a daemon that holds it open would be waited for
        try:
            done = subprocess.run(
                [CONTROL, *arguments], env=environment, input=commands, stdout=output, stderr=output, text=True,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        output.seek(0)
        return None if done.returncode == 0 else output.read().strip() or f"exit status {done.returncode}"

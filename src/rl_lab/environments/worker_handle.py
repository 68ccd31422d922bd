"""The parent's end of one worker process: starting it, orders and answers, patience, and its last words."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from rl_lab.environments import worker as protocol
from rl_lab.environments.failures import last_words
from rl_lab.environments.shared_arrays import anonymous_file
from rl_lab.errors import ConfigError, EnvironmentFailure

_COMMAND = "import sys; from rl_lab.environments.worker import main; main(*map(int, sys.argv[1:]))"
_TRACE_TAIL = 3000
_CLOSING_S = 3.0  # how long an environment may take to close
_SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_log = logging.getLogger(__name__)


class WorkerError(Exception):
    """A worker raised, died or hung. The text is its own where it left one."""


class WorkerHandle:
    """The parent's end of one worker process."""

    def __init__(self, *, slot: int, indices: list[int], arrays_fd: int, setup: dict[str, Any]) -> None:
        self.slot, self.indices = slot, indices
        self._environment_id = setup["settings"].id
        ours, theirs = socket.socketpair()
        self._trace_fd = anonymous_file()
        environment = {**{name: "1" for name in _SINGLE_THREAD}, **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([path for path in sys.path if path])
        descriptors = (theirs.fileno(), arrays_fd, self._trace_fd)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, *map(str, descriptors)],  # -P: not from the current folder
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints must not mix with a command's own output
            env=environment,
        )
        theirs.close()
        self._connection: Connection = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _kill, self._process)
        content = cloudpickle.dumps({**setup, "slot": slot, "indices": indices})
        self.send(pickle.dumps((list(sys.path), setup["settings"].module, content)))

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise WorkerError(self._last_words()) from error

    def order(self, command: bytes, content: Any = None) -> None:
        self.send(command + pickle.dumps(content))

    def answer(self, timeout: float, setting: str = "worker_timeout") -> Any:
        """Wait for the answer to the last order; None for a plain "done". `setting` is where the patience is set."""
        try:
            if not self._connection.poll(timeout):
                raise WorkerError(self._where_it_hangs(timeout, setting))
            message = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerError(self._last_words()) from error
        kind = message[:1]
        if kind == protocol.OK:
            return None
        content = pickle.loads(message[1:])
        if kind == protocol.DONE:
            return content
        origin, text = content
        if kind == protocol.FATAL:
            raise ConfigError(text) if origin == "config" else EnvironmentFailure(text)
        raise WorkerError(text)

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return f"{self._trace()}\nthe worker process closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"{self._trace()}\nthe worker process {how}"

    def _where_it_hangs(self, timeout: float, setting: str) -> str:
        """Ask the worker for a traceback: a signal handler answers even where Python itself is stuck."""
        if hasattr(signal, "SIGUSR1"):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        return f"{self._trace()}\nthe worker process gave no answer for {timeout:g} s, environment.{setting}"

    def _trace(self) -> str:
        size = os.fstat(self._trace_fd).st_size
        return os.pread(self._trace_fd, _TRACE_TAIL, max(0, size - _TRACE_TAIL)).decode(errors="replace").strip()

    def _let_it_end(self) -> str | None:
        """Have the environments closed and the process end by itself; why it did not, or None."""
        try:
            self.send(protocol.CLOSE)
            code = self._process.wait(timeout=_CLOSING_S)
        except subprocess.TimeoutExpired:
            return last_words(self._where_it_hangs(_CLOSING_S, "close()"))
        except WorkerError as failure:
            return last_words(str(failure))
        return None if code == 0 else last_words(self._last_words())

    def close(self, *, kindly: bool) -> None:
        """End the process. Closing twice is harmless."""
        if self._connection.closed:
            return
        problem = self._let_it_end() if kindly else None
        if problem is not None:
            _log.warning("environment.id=%s did not close as it should: %s.", self._environment_id, problem)
        self._finalizer()
        self._connection.close()
        os.close(self._trace_fd)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()

"""A worker process: some environments of a vector environment, stepped at the parent's word.

Started as a plain child process, so it neither inherits the parent's threads nor imports its main script. Messages are
a command byte, with a pickle behind it where there is more to say. Arrays travel through shared memory.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

STEP, START, REPLAY, RENDER, ATTACH, CLOSE = (bytes([code]) for code in range(6))
OK, DONE, FAILED, FATAL = b"k", b"d", b"f", b"x"


def main(connection_fd: int, arrays_fd: int, trace_fd: int) -> None:
    """Serve until the parent closes the connection, says so, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, they are the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(trace_fd, all_threads=False)  # a crash is told by the thread that made it
    faulthandler.register(signal.SIGUSR1, trace_fd, all_threads=False)  # asked for when this worker seems to hang
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection: Connection = Connection(connection_fd)
    status = 0
    try:
        Worker(connection, arrays_fd).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    except (Exception, SystemExit):  # environments that cannot be closed
        os.write(trace_fd, traceback.format_exc().encode())
        status = 1
    os._exit(status)  # libraries with their own threads must not hold a worker up


def end_with_parent(parent: int) -> None:
    """A parent that was killed cannot say goodbye, and a hung environment would not hear it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class Worker:
    """The environments of one worker."""

    def __init__(self, connection: Connection, arrays_fd: int) -> None:
        self._connection, self._arrays_fd = connection, arrays_fd

    def serve(self) -> None:
        path, module, setup = pickle.loads(self._connection.recv_bytes())
        sys.path[:] = path
        try:
            from rl_lab.environments.group import prepare_worker, register

            prepare_worker(module)
            content = pickle.loads(setup)
            register(content["registered"])
            if content.get("probe"):
                self._probe(content["settings"])
                return
            self._build(content)
        except (Exception, SystemExit) as error:
            self._report(error)
            return
        commands: dict[bytes, Callable[[Any], None]] = {
            START: self._start,
            REPLAY: self._replay,
            RENDER: self._render,
            ATTACH: self._attach,
        }
        while True:
            message = self._connection.recv_bytes()
            command = message[:1]
            if command == CLOSE:
                self._group.close()
                return
            try:
                if command == STEP:
                    self._step()
                else:
                    commands[command](pickle.loads(message[1:]))
            except (Exception, SystemExit) as error:
                self._report(error)

    def _report(self, error: BaseException) -> None:
        from rl_lab.errors import ConfigError, RLLabError

        fatal = isinstance(error, RLLabError)
        kind = "config" if isinstance(error, ConfigError) else "environment"
        text = str(error) if fatal else traceback.format_exc()
        self._connection.send_bytes((FATAL if fatal else FAILED) + pickle.dumps((kind, text)))

    def _done(self, answer: Any) -> None:
        self._connection.send_bytes(DONE + pickle.dumps(answer))

    def _probe(self, settings: Any) -> None:
        from rl_lab.environments.inspection import probe

        self._done(probe(settings))

    def _build(self, setup: dict[str, Any]) -> None:
        from rl_lab.environments.group import EnvironmentGroup

        self._group = EnvironmentGroup(setup)
        self._done(self._group.description)

    def _attach(self, plan: Any) -> None:
        from rl_lab.environments.shared_arrays import SharedArrays

        self._group.attach(SharedArrays(plan, self._arrays_fd))
        self._done(None)

    def _start(self, episodes: dict[int, tuple[int, int | None]]) -> None:
        self._group.start(episodes)
        self._done(None)

    def _step(self) -> None:
        endings = self._group.step()
        if endings:
            self._done(endings)
        else:
            self._connection.send_bytes(OK)

    def _replay(self, orders: list[Any]) -> None:
        self._done(self._group.replay(orders))

    def _render(self, _: Any) -> None:
        self._done(self._group.frame())

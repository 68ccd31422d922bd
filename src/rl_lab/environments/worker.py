"""A worker process: some environments of a vector environment, stepped at the parent's word.

Started as a plain child process, so it neither inherits the parent's threads nor imports its main script. Messages are
a command byte, with a pickle behind it where there is more to say. Arrays travel through shared memory.
"""

from __future__ import annotations

import contextlib
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
    faulthandler.enable(trace_fd)
    faulthandler.register(signal.SIGUSR1, trace_fd, all_threads=False)  # asked for when this worker seems to hang
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection: Connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        Worker(connection, arrays_fd).serve()
    os._exit(0)  # libraries with their own threads must not hold a worker up


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
            self._import(module)
            content = pickle.loads(setup)
            self._register(content["registered"])
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
                for runner in self._runners.values():
                    runner.close()
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

    def _import(self, module: str | None) -> None:
        """The user's module comes first: what was registered there cannot be unpickled without it."""
        from rl_lab.environments.factory import import_user_module
        from rl_lab.environments.headless import prepare_rendering

        prepare_rendering()
        import_user_module(module)

    def _register(self, specs: list[Any]) -> None:
        import gymnasium

        for spec in specs:
            gymnasium.registry.setdefault(spec.id, spec)

    def _probe(self, settings: Any) -> None:
        from rl_lab.environments.inspection import probe

        self._done(probe(settings))

    def _build(self, setup: dict[str, Any]) -> None:
        from rl_lab.environments.runner import EpisodeRunner

        self._slot = setup["slot"]
        self._runners = {
            index: EpisodeRunner(
                settings=setup["settings"], index=index, seeds=setup["seeds"], render=setup["render"] and index == 0
            )
            for index in setup["indices"]
        }
        adapter = next(iter(self._runners.values())).adapter
        self._indices, self._convert = list(self._runners), adapter.actions
        self._done((adapter.observation_spec, adapter.action_spec, adapter.notes))

    def _attach(self, plan: Any) -> None:
        from rl_lab.environments.shared_arrays import SharedArrays

        self._arrays = SharedArrays(plan, self._arrays_fd)
        self._done(None)

    def _start(self, episodes: dict[int, tuple[int, int | None]]) -> None:
        """Begin the given episode in each environment, with another seed than its own where one is given."""
        from rl_lab.environments.shared_arrays import STILL

        for index, runner in self._runners.items():
            if self._arrays.play[index] == STILL:
                continue
            self._arrays.busy[self._slot] = index
            runner.restart(episodes[index][0], self._arrays.now, index, episodes[index][1])
        self._done(None)

    def _step(self) -> None:
        from rl_lab.environments.shared_arrays import ON, STILL

        now, last, reward, busy = self._arrays.now, self._arrays.last, self._arrays.reward, self._arrays.busy
        play = self._arrays.play
        endings = []
        for index, action in zip(self._indices, self._convert(self._arrays.action[self._indices]), strict=True):
            if play[index] == STILL:
                reward[index] = 0.0
                continue
            busy[self._slot] = index
            runner = self._runners[index]
            reward[index], ending = runner.step(action, now, index)
            if ending is not None:
                for key, value in now.items():
                    last[key][index] = value[index]
                if play[index] == ON:
                    runner.start(runner.episode + 1, now, index)
                else:
                    play[index] = STILL
                endings.append((index, ending, runner.anchor))
        if endings:
            self._done(endings)
        else:
            self._connection.send_bytes(OK)

    def _replay(self, orders: list[Any]) -> None:
        answers = []
        for order in orders:
            self._arrays.busy[self._slot] = order.index
            runner = self._runners[order.index]
            answers.append((order.index, *runner.replay(order.anchor, order.actions, self._arrays.now, order.index)))
            runner.episode = order.episode
        self._done(answers)

    def _render(self, _: Any) -> None:
        self._done(self._runners[0].frame_or_reason())

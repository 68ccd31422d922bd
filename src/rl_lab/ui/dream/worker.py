"""The process that plays a dream: takes commands, keeps time, sends moments with their pictures.

A process of its own, because a model and an environment may take their time, or crash: the server and other dreams go
on. Messages are plain values: (header, pictures).
"""

from __future__ import annotations

import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Message = tuple[dict[str, Any], list[bytes]]
EAGER = 0.006  # seconds after a step from which on a pressed key acts at once, without waiting for the next tick
POLL_CHECKPOINTS = 2.0  # seconds


def run_worker(connection: Connection, folder: str, trust: bool) -> None:
    """Serve until the other end hangs up. Where nothing can be played, one message says why."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from rl_lab.errors import RLLabError
        from rl_lab.ui.dream.player import Player

        try:
            player = Player(Path(folder), trust=trust)
        except RLLabError as error:
            connection.send(({"type": "fatal", "text": str(error)}, []))
            return
        Clock(connection, player).run()
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return
    except Exception as error:
        text = (
            f"The dream stopped: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        )
        connection.send(({"type": "fatal", "text": text, "traceback": traceback.format_exc()[-4000:]}, []))


class Clock:
    """Answers commands as they come and steps at the chosen rate while the dream is playing."""

    def __init__(self, connection: Connection, player: Any) -> None:
        self.connection, self.player = connection, player
        self._last_step = self._last_look = 0.0

    def run(self) -> None:
        while True:
            now = time.monotonic()
            due = self._last_step + 1.0 / self.player.fps
            wait = max(0.0, due - now) if self.player.is_moving else 0.25
            if self.connection.poll(wait):
                self._answer(self.connection.recv())
            if self.player.is_moving and time.monotonic() >= self._last_step + 1.0 / self.player.fps:
                self._step()
            self._look_for_checkpoints()

    def _answer(self, command: dict[str, Any]) -> None:
        for message in self.player.command(command):
            self.connection.send(message)
        pressed = command.get("type") == "input" and self.player.is_moving
        if pressed and time.monotonic() - self._last_step > EAGER:
            self._step()

    def _step(self) -> None:
        self._last_step = time.monotonic()
        for message in self.player.advance():
            self.connection.send(message)

    def _look_for_checkpoints(self) -> None:
        if time.monotonic() - self._last_look > POLL_CHECKPOINTS:
            self._last_look = time.monotonic()
            for message in self.player.news():
                self.connection.send(message)

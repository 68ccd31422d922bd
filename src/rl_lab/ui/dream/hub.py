"""The dreams that are open: one process for each run, and the browsers that watch and steer it together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from rl_lab.ui.dream.worker import Message, run_worker

LINGER = 45.0  # seconds that a dream waits for a browser to come back
MAX_DREAMS = 4
BEHIND = 40  # messages from which on a slow browser is sent numbers without pictures
MAX_COMMAND = 20_000  # characters
DROPPABLE = ("moment", "plan")


class Client:
    """One browser: what it still has to be sent."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: asyncio.Queue[Message | None] = asyncio.Queue()


class Dream:
    """A worker process and the clients of it. What one of them does, all see."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_worker, args=(theirs, str(folder), trust), daemon=True)
        self.process.start()
        theirs.close()
        self.clients: dict[int, Client] = {}
        self.ended: str | None = None  # why, in one line
        self.last_left: asyncio.TimerHandle | None = None
        self._count = 0
        self._reader: threading.Thread | None = None

    def join(self) -> Client:
        """A new client; it is told everything first."""
        loop = asyncio.get_running_loop()
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, args=(loop,), daemon=True)
            self._reader.start()
        if self.last_left is not None:
            self.last_left.cancel()
        self._count += 1
        client = self.clients[self._count] = Client(self._count)
        self.send({"type": "hello", "client": client.number})
        return client

    def send(self, command: Mapping[str, Any]) -> None:
        try:
            self.connection.send(dict(command))
        except OSError:
            self._end("The dream's process is gone. Reload the page to begin anew.")

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the server's loop ended first
            while True:
                try:
                    message = self.connection.recv()
                except (EOFError, OSError, TypeError):  # the last where this end is closed while it waits
                    text = "The dream's process has ended. Reload the page to begin anew."
                    loop.call_soon_threadsafe(self._end, text)
                    return
                loop.call_soon_threadsafe(self._deliver, message)

    def _deliver(self, message: Message) -> None:
        header, pictures = message
        if header.get("type") == "fatal":
            self._end(str(header["text"]))
            return
        addressee = header.pop("client", None)
        plain = {key: value for key, value in header.items() if key != "pictures"}
        for client in list(self.clients.values()):
            if addressee is not None and client.number != addressee:
                continue
            if client.queue.qsize() > BEHIND and header["type"] in DROPPABLE:
                client.queue.put_nowait((plain, []))
            else:
                client.queue.put_nowait((header, pictures))

    def _end(self, text: str) -> None:
        self.ended = self.ended or text
        for client in self.clients.values():
            client.queue.put_nowait(({"type": "fatal", "text": self.ended}, []))
            client.queue.put_nowait(None)

    def close(self) -> None:
        """End the process at once: it has nothing to save, and SDL, which draws some environments, catches SIGTERM."""
        self.process.kill()
        self.connection.close()


class Dreams:
    """Dreams by run."""

    def __init__(self, trusted: frozenset[str] = frozenset()) -> None:
        self._dreams: dict[str, Dream] = {}
        self._trusted = trusted

    def open(self, run: str, folder: Path) -> Dream | None:
        """The dream of a run, begun if need be; None where too many are open."""
        dream = self._dreams.get(run)
        if dream is not None and (dream.ended is not None or not dream.process.is_alive()):
            self._drop(run)
            dream = None
        if dream is None:
            if len(self._dreams) >= MAX_DREAMS:
                idle = next((name for name, one in self._dreams.items() if not one.clients), None)
                if idle is None:
                    return None
                self._drop(idle)
            dream = self._dreams[run] = Dream(folder, trust=run in self._trusted)
        return dream

    async def serve(self, socket: WebSocket, run: str, folder: Path) -> None:
        """Talk with one browser until it leaves."""
        await socket.accept()
        dream = self.open(run, folder)
        if dream is None:
            text = f"{MAX_DREAMS} dreams are open already. Close the page of one of them first."
            await socket.send_text(json.dumps({"type": "fatal", "text": text}))
            await socket.close()
            return
        client = dream.join()
        sending = asyncio.create_task(_send_all(socket, client))
        try:
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                command = _parsed(message.get("text") or "")
                if command is not None:
                    dream.send(command)
        finally:
            sending.cancel()
            dream.clients.pop(client.number, None)
            if not dream.clients:
                dream.send({"type": "play", "on": False})
                dream.last_left = asyncio.get_running_loop().call_later(LINGER, self._drop_idle, run)

    def _drop_idle(self, run: str) -> None:
        if run in self._dreams and not self._dreams[run].clients:
            self._drop(run)

    def _drop(self, run: str) -> None:
        dream = self._dreams.pop(run, None)
        if dream is not None:
            dream.close()

    def close(self) -> None:
        for run in list(self._dreams):
            self._drop(run)


async def _send_all(socket: WebSocket, client: Client) -> None:
    try:
        while (message := await client.queue.get()) is not None:
            header, pictures = message
            if pictures:
                await socket.send_bytes(framed(header, pictures))
            else:
                await socket.send_text(json.dumps(header, allow_nan=False))
        if socket.application_state is WebSocketState.CONNECTED:
            await socket.close()
    except (WebSocketDisconnect, RuntimeError):
        return


def framed(header: Mapping[str, Any], pictures: list[bytes]) -> bytes:
    """A header's length, the header with the size of each picture, and the pictures."""
    described = zip(header["pictures"].items(), pictures, strict=True)
    sized = {name: {**entry, "size": len(data)} for (name, entry), data in described}
    text = json.dumps({**header, "pictures": sized}, allow_nan=False).encode()
    return struct.pack("<I", len(text)) + text + b"".join(pictures)


def _parsed(text: str) -> dict[str, Any] | None:
    if len(text) > MAX_COMMAND:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    value.pop("client", None)
    return value

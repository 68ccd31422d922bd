"""The server of `rl-lab ui` and `rl-lab dream`: the page, the runs as JSON, media, actions, and the dream's socket."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from rl_lab import __version__
from rl_lab.errors import RLLabError, RunNotFoundError
from rl_lab.ui import compare, run_detail
from rl_lab.ui.curves import CurveReader
from rl_lab.ui.dream.hub import Dreams
from rl_lab.ui.run_index import RunIndex
from rl_lab.ui.security import Guard
from rl_lab.ui.writer import writer_of

STATIC = Path(__file__).parent / "static"
REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"

Handler = Callable[[Request], Awaitable[Response]]


def make_app(root: Path | str, *, token: str | None = None, dreams: Dreams | None = None) -> ASGIApp:
    """The application for the runs below `root`, behind its guard."""
    pages = Pages(RunIndex(root), dreams or Dreams())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        pages.dreams.close()

    routes = [
        Route("/", pages.index),
        Route("/api/runs", _answers(pages.runs)),
        Route("/api/run", _answers(pages.run)),
        Route("/api/curves", _answers(pages.curves)),
        Route("/api/glossary", _answers(pages.glossary), methods=["POST"]),
        Route("/api/differences", _answers(pages.differences)),
        Route("/api/gauges", _answers(pages.gauges)),
        Route("/api/compare", _answers(pages.compare)),
        Route("/api/media", _answers(pages.media)),
        Route("/api/report", _answers(pages.report)),
        Route("/api/stop", _answers(pages.stop), methods=["POST"]),
        WebSocketRoute("/api/dream", pages.dream),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token=token)


def _answers(handler: Handler) -> Handler:
    """One clear line in place of a traceback; the server lives on."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RunNotFoundError as error:
            return _error(404, str(error))
        except RLLabError as error:
            return _error(400, str(error))
        except OSError as error:
            return _error(404, f"The run's files cannot be read: {error.strerror or error}.")

    return answer


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


class Pages:
    """The handlers. What reads files does so in a thread, for other requests go on meanwhile."""

    def __init__(self, index: RunIndex, dreams: Dreams) -> None:
        self.runs_index, self.reader, self.dreams = index, CurveReader(), dreams

    async def index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def runs(self, request: Request) -> Response:
        """Rows newer than `since`; all of them without it."""
        changes = await run_in_threadpool(self.runs_index.changes, _whole(request, "since"))
        return _json({**asdict(changes), "root": str(self.runs_index.root), "rl_lab": __version__})

    async def run(self, request: Request) -> Response:
        def read() -> dict[str, Any]:
            run_id, folder = self._run(request)
            return {**run_detail.detail(run_id, folder), "row": self.runs_index.row(run_id)}

        return _json(await run_in_threadpool(read))

    async def curves(self, request: Request) -> Response:
        """Columns of metrics.jsonl after `count` rows of `epoch`, and the run's row."""

        def read() -> dict[str, Any]:
            run_id, folder = self._run(request)
            new = self.reader.tail(folder).since(_whole(request, "epoch"), _whole(request, "count"))
            return {**new, "row": self.runs_index.row(run_id)}

        return _json(await run_in_threadpool(read))

    async def glossary(self, request: Request) -> Response:
        names = await request.json()
        known = [name for name in names if isinstance(name, str)][:2000] if isinstance(names, list) else []
        return _json(run_detail.explanations(known))

    async def differences(self, request: Request) -> Response:
        return _json(await run_in_threadpool(run_detail.config_differences, self._run(request)[1]))

    async def gauges(self, request: Request) -> Response:
        return _json(await run_in_threadpool(run_detail.gauges, self._run(request)[1]))

    async def compare(self, request: Request) -> Response:
        query = request.query_params
        folders = [(run, self.runs_index.folder(run)) for run in query.getlist("run")]
        metric, axis = query.get("metric", "eval/return_mean"), query.get("x", "env_steps")
        return _json(await run_in_threadpool(compare.compare, folders, metric, axis))

    async def media(self, request: Request) -> Response:
        path = run_detail.media_file(self._run(request)[1], request.query_params.get("path", ""))
        if path is None:
            return _error(404, "There is no such picture or film in this run.")
        return FileResponse(path, media_type=run_detail.MEDIA_TYPES[path.suffix])

    async def report(self, request: Request) -> Response:
        """The run's report.html. It may come from a stranger: it is shown without scripts and without the network."""
        folder = self._run(request)[1]
        path = folder / "report.html"
        if not path.is_file() or path.resolve().parent != folder.resolve():
            return _error(404, "This run has no report yet.")
        return FileResponse(path, media_type="text/html", headers={"content-security-policy": REPORT_POLICY})

    async def stop(self, request: Request) -> Response:
        """Ask the process that writes the run to stop: it saves a checkpoint first."""
        folder = self._run(request)[1]
        process = await run_in_threadpool(writer_of, folder)
        if process is None:
            return _error(409, "No process of this machine is writing this run now.")
        try:
            process.send_signal(signal.SIGTERM)
        except psutil.Error as error:
            return _error(409, f"The run cannot be stopped from here: {error}.")
        return _json({"stopped": process.pid})

    async def dream(self, socket: WebSocket) -> None:
        """Play inside a run's model."""
        run = socket.query_params.get("run", "")
        try:
            folder = await run_in_threadpool(self.runs_index.folder, run)
        except RunNotFoundError as error:
            await socket.accept()
            await socket.send_text(json.dumps({"type": "fatal", "text": str(error)}))
            await socket.close()
            return
        await self.dreams.serve(socket, run, folder)

    def _run(self, request: Request) -> tuple[str, Path]:
        run_id = request.query_params.get("run", "")
        return run_id, self.runs_index.folder(run_id)


def _whole(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    return int(text) if text.isdigit() else 0


def _json(value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False, default=str), media_type="application/json")

"""Opens the port, prints the address and runs the server until it is stopped."""

from __future__ import annotations

import secrets
import socket
import sys
import webbrowser
from pathlib import Path
from urllib.parse import quote

import uvicorn

from rl_lab.errors import ConfigError
from rl_lab.ui.dream.hub import Dreams
from rl_lab.ui.security import is_loopback
from rl_lab.ui.server import make_app

TRIED_PORTS = 20
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of this machine


def serve(
    root: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8600,
    browser: bool = True,
    view: str = "",
    dreams: Dreams | None = None,
) -> int:
    """Serve the runs below `root` until Ctrl-C. `view`: the part of the address after `#` that the page opens at."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder.resolve()}. Train a run first (rl-lab train), or name another.")
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    listener = _listen(host, port)
    reached = socket.gethostname() if host in EVERYWHERE else host  # others cannot open 0.0.0.0
    shown = reached if ":" not in reached else f"[{reached}]"
    address = f"http://{shown}:{listener.getsockname()[1]}/"
    full = address + (f"?token={quote(token)}" if token else "") + (f"#{view}" if view else "")
    sys.stdout.write(f"RL Lab shows {folder.resolve()} at\n  {full}\nCtrl-C stops it.\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        make_app(folder, token=token, dreams=dreams), log_level="warning", ws_ping_interval=20.0, ws_max_size=1 << 20,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    if browser:
        webbrowser.open(full)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket on the port, or on one of the next ones where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [0] if port == 0 else range(port, port + TRIED_PORTS):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno not in (98, 48):  # taken: try the next one
                raise ConfigError(f"--host {host} --port {candidate}: {error.strerror}.") from error
            continue
        return listener
    raise ConfigError(f"The ports {port} to {port + TRIED_PORTS - 1} are all taken. Choose another: --port N.")


def view_of(view: str, run: str) -> str:
    """The part of the address that opens a view of a run."""
    return f"/{view}?id={quote(run, safe='')}"

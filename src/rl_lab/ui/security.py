"""Who may ask the server for what: hosts, the token, requests from other sites, and headers that confine the page."""

from __future__ import annotations

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "rl_lab_token"
ACTION_HEADER = "x-rl-lab"  # a page of another site cannot send it without being asked first, and is refused then
SAFE_METHODS = ("GET", "HEAD")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware in front of everything that the server answers, static files and WebSockets among it.

    Without a token only loopback names are accepted as `Host`, so that a page elsewhere cannot reach the server under a
    name of its own. With one, each request must carry it: as a cookie, a bearer token, or `?token=` once, which sets
    the cookie. What is not a GET must come from this page: same origin, and with a header of its own.
    """

    def __init__(self, app: ASGIApp, *, token: str | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(scope, receive, send, *refusal)
            return
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if self.token is not None and scope["type"] == "http" and "token" in query and scope["method"] == "GET":
            await _with_cookie(scope["path"], self.token)(scope, receive, send)
            return
        await self.app(scope, receive, _confined(send) if scope["type"] == "http" else send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self.token is None:
            if not is_loopback(urlsplit(f"//{host}").hostname or ""):
                return 421, "This server answers on this machine's own address only."
        elif not self._has_token(scope, headers):
            return 401, "The token is missing or wrong. Open the address that `rl-lab ui` printed."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Requests from other sites are refused."
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not _is_navigation(
            scope, headers
        ):
            return 403, "Requests from other sites are refused."
        if scope["type"] == "websocket" and origin is None:
            return 403, "A WebSocket must name its origin."
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and ACTION_HEADER not in headers:
            return 403, f"Actions need the header {ACTION_HEADER}."
        return None

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        assert self.token is not None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])
        given.append(headers.get("authorization", "").removeprefix("Bearer "))
        given.append(_cookie(headers))
        return any(hmac.compare_digest(value.encode(), self.token.encode()) for value in given if value)


def _is_navigation(scope: Scope, headers: Headers) -> bool:
    """A link elsewhere may open the page itself."""
    return scope["type"] == "http" and scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _with_cookie(path: str, token: str) -> ASGIApp:
    response = RedirectResponse(path or "/", status_code=303)
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/")
    return response


def _confined(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("content-security-policy", POLICY)
            headers["x-content-type-options"] = "nosniff"
            headers["referrer-policy"] = "no-referrer"
            headers["x-frame-options"] = "DENY"
            headers["cross-origin-resource-policy"] = "same-origin"
            headers["cross-origin-opener-policy"] = "same-origin"
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return with_headers


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 4000 + status, "reason": text})
        return
    await PlainTextResponse(text, status)(scope, receive, send)

"""Door of the page: /dashboard, its files, its live stream, and its question to the policy.

Door: a small ASGI app; the roof puts it at /dashboard. The page's other questions go where anybody
asks them: /index/rank, /rooms, /diagnosis. Open it to add something that only the page needs.

    GET  /dashboard                 the page: code of ours, no facts, so open to everybody
    GET  /dashboard/static/NAME     its files
    GET  /dashboard/live            the picture, as server-sent events    } the admin's key,
    POST /dashboard/weigh           {path, body} -> who would be asked    } or loopback
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..access import admit
from ..admin_workers import WorkerDesk
from ..errors import GatewayError
from ..fleet import Waited
from ..gateway import Gateway
from ..request import COUNTS, parse
from .live import Board, Live
from .picture import picture
from .weighing import chosen, weighed

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",  # asked again each time: a page of another release is a puzzle
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
MOST_BYTES = 8 * 1024 * 1024  # of a prompt that is asked about
PAGE = "/page"
Handler = Callable[[Request], Awaitable[Response]]


def dashboard_app(
    gateway: Gateway,
    desk: WorkerDesk | None = None,
    lag_ms: Callable[[], float] = lambda: 0.0,
    queued: Callable[[], int] = lambda: 0,
) -> Dashboard:
    """The app; `desk` knows the workers that do not serve yet, `queued` the requests that wait."""
    clock = gateway.clock

    def waiting() -> Iterable[Waited]:
        return desk.waiting() if desk is not None else ()

    def shown() -> dict[str, Any]:
        now, wall = clock.now(), clock.wall()
        return {**picture(gateway, waiting(), lag_ms(), now, wall), "queued": queued()}

    board = Board(shown, clock)

    async def live(request: Request) -> Response:
        return Live(board)

    async def weigh(request: Request) -> Response:
        return await _weigh(gateway, request)

    key = gateway.settings.admin_key
    routes = [
        Route(PAGE, _page, methods=["GET"]),
        Route("/", _without_slash, methods=["GET"]),
        Route("/static/{name}", _file, methods=["GET"]),
        Route("/live", _guarded(live, key), methods=["GET"]),
        Route("/weigh", _guarded(weigh, key), methods=["POST"]),
    ]
    made = Dashboard(
        routes=routes, exception_handlers={GatewayError: _ours, HTTPException: _refused}
    )
    made.board = board
    return made


class Dashboard(Starlette):
    """The app; its own name, without a slash, is the page. Its board is a Part."""

    board: Board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == scope.get("root_path", ""):
            scope = dict(scope, path=scope["path"] + PAGE)
        await super().__call__(scope, receive, send)


def _files() -> dict[str, bytes]:
    """The page's files, read once; nothing else can be asked for."""
    return {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.is_file()}


FILES = _files()


async def _page(request: Request) -> Response:
    return Response(FILES["page.html"], media_type=KINDS[".html"], headers=HEADERS)


async def _without_slash(request: Request) -> Response:
    """The page names its files beside itself, so it has one address only."""
    return RedirectResponse("../dashboard", 308)


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise GatewayError("not_found", f"the page has no file {name[:80]!r}")
    kind = KINDS.get(Path(name).suffix, "application/octet-stream")
    return Response(FILES[name], media_type=kind, headers=HEADERS)


def _guarded(handler: Handler, key: str) -> Handler:
    async def asked(request: Request) -> Response:
        admit(_seen(request), key)
        return await handler(request)

    return asked


def _seen(request: Request) -> Request:
    """The request as the admin check shall see it: a browser names the page that asks, and our own
    one at home is nobody else; a name that merely leads here is somebody else's page."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    mine = _at_home(host) and origin in (None, f"{request.url.scheme}://{host}")
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"origin"]
    if not mine:
        headers.append((b"origin", (origin or f"//{host}").encode("latin-1", "replace")))
    return Request({**request.scope, "headers": headers})


def _at_home(host: str) -> bool:
    """Does this Host header name this machine itself?"""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Question(msgspec.Struct):
    """What the page asks: a body as it would be sent, and where to."""

    path: str
    body: msgspec.Raw


async def _weigh(gateway: Gateway, request: Request) -> Response:
    """Whom this prompt would be given to now. Nothing is sent, and nobody's turn is taken."""
    question = await _question(request)
    ask = parse(question.path, bytes(question.body), "weigh")
    try:
        prompt, (prefills, decodes, met) = await gateway.weigh(ask)
    except GatewayError as error:
        if error.status != 503:
            raise
        return _json({"chosen": None, "why_none": error.message})
    settings = gateway.settings
    return _json(
        {
            "tokens": prompt.total or None,
            "not_tokenised": prompt.reason,
            "prefill": weighed(settings.prefill_policy, prefills, prompt.total),
            "decode": weighed(settings.decode_policy, decodes, 0),
            **chosen(prefills, met),
        }
    )


async def _question(request: Request) -> _Question:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise GatewayError("payload_too_large", f"the body is longer than {MOST_BYTES} bytes")
        parts.append(part)
    try:
        question = msgspec.json.decode(b"".join(parts), type=_Question)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise GatewayError("invalid_request", f"body: {error}", "body") from None
    if question.path not in COUNTS:
        known = ", ".join(sorted(COUNTS))
        wrong = f"path {question.path[:80]!r}: must be one of {known}"
        raise GatewayError("invalid_request", wrong, "path")
    return question


def _json(said: object) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(said), media_type="application/json", headers=headers)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError), "registered for it"
    headers = {name.decode(): value.decode("latin-1") for name, value in error.head()}
    return Response(error.body(), error.status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    code = "not_found" if error.status_code == 404 else "invalid_request"
    message = f"{request.method} {request.url.path}: {error.detail}"
    shape = GatewayError(code, message, status=error.status_code)
    return await _ours(request, shape)

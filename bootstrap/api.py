"""Bootstrap API: the rank directory over HTTP, as engines speak it, and a view for people.

Door: bare ASGI, because the bytes are fixed by SGLang 0.5.23. Below it answers.py, which words
every answer; above it whoever runs a port. Open it to add a route or a limit.

    PUT, GET /route   POST /register_dp_rank   POST /query_dp_ranks   GET /health      as SGLang
    GET /ranks   GET /metrics   header x-kvplane-generation on every answer            ours
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvplane.runtime import Clock

from . import answers
from .answers import GENERATION, Answer
from .directory import Directory
from .errors import BadInput, BootstrapError, Inconsistent, LateLife
from .metrics import BootstrapMetrics
from .rooms import RoomTable
from .settings import DirectorySettings

log = logging.getLogger(__name__)

STATUS: dict[type[BootstrapError], int] = {BadInput: 400, Inconsistent: 400, LateLife: 409}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Handler = Callable[[Scope, Receive], Awaitable[Answer]]


class _Unread(Exception):
    """The body was not read to its end: the connection is of no further use."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class BootstrapApp:
    """ASGI app over one directory and one room table."""

    def __init__(
        self,
        directory: Directory,
        rooms: RoomTable,
        clock: Clock,
        settings: DirectorySettings,
        metrics: BootstrapMetrics | None,
        registry: CollectorRegistry | None,
    ) -> None:
        self._directory, self._rooms, self._clock = directory, rooms, clock
        self._settings, self._metrics, self._registry = settings, metrics, registry
        self._routes: dict[str, dict[str, Handler]] = {
            "/route": {"GET": self._lookup, "PUT": self._register},
            "/register_dp_rank": {"POST": self._register_room},
            "/query_dp_ranks": {"POST": self._query_rooms},
            "/health": {"GET": self._health, "HEAD": self._health},
            "/ranks": {"GET": self._ranks, "HEAD": self._ranks},
        }
        if registry is not None:
            self._routes["/metrics"] = {"GET": self._scrape, "HEAD": self._scrape}
        if metrics is not None:
            metrics.watch(rooms)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            answer = await self._answer(scope, receive)
            if self._metrics is not None:
                path = scope["path"]
                route = path if path in self._routes else "other"
                self._metrics.requests.labels(route, str(answer.status)).inc()
            await self._send(scope, send, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        handlers = self._routes.get(scope["path"])
        if handlers is None:
            return answers.NOT_FOUND
        handler = handlers.get(scope["method"])
        if handler is None:
            if scope["path"] == "/route":
                return answers.WRONG_ROUTE_METHOD
            return answers.wrong_method(",".join(handlers))
        try:
            return await handler(scope, receive)
        except _Unread as stop:
            return stop.answer
        except tuple(STATUS) as error:
            status = next(s for kind, s in STATUS.items() if isinstance(error, kind))
            log.info("request refused path=%s reason=%s", scope["path"], error)
            return answers.said(str(error), status)

    async def _send(self, scope: Scope, send: Send, answer: Answer) -> None:
        headers = [
            (b"content-type", answer.kind.encode()),
            (b"content-length", str(len(answer.body)).encode()),
            (GENERATION.encode(), self._directory.generation.encode()),
            *((name.encode(), value.encode()) for name, value in answer.headers),
        ]
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await send(start)
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _lookup(self, scope: Scope, receive: Receive) -> Answer:
        return answers.lookup(self._directory, scope["query_string"], self._clock.now())

    async def _register(self, scope: Scope, receive: Receive) -> Answer:
        new = answers.registration(await self._body(scope, receive), _header(scope, GENERATION))
        now = self._clock.now()
        done = self._directory.register(new, now)
        said = answers.accepted_text(new, done, self._directory, now)
        if done.replaced is not None or done.differing:
            log.warning("rank registered differing=%s %s", "; ".join(done.differing) or "-", said)
        else:
            log.info("rank registered %s", said)
        if self._metrics is not None:
            self._metrics.lives.inc(done.new_life)
            self._metrics.takeovers.inc(done.replaced is not None)
            self._metrics.differing.inc(bool(done.differing))
        return answers.OK

    async def _register_room(self, scope: Scope, receive: Receive) -> Answer:
        raw = await self._body(scope, receive)
        return answers.register_room(self._rooms, raw, self._clock.now())

    async def _query_rooms(self, scope: Scope, receive: Receive) -> Answer:
        raw = await self._body(scope, receive)
        return answers.query_rooms(self._rooms, raw, self._clock.now())

    async def _health(self, scope: Scope, receive: Receive) -> Answer:
        return answers.OK

    async def _ranks(self, scope: Scope, receive: Receive) -> Answer:
        return answers.ranks(self._directory, self._rooms, self._clock.now())

    async def _scrape(self, scope: Scope, receive: Receive) -> Answer:
        assert self._registry is not None, "route without a registry"
        return Answer(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, bounded in size and time."""
        most = self._settings.most_body_bytes
        parts: list[bytes] = []
        length = 0
        try:
            async with asyncio.timeout(self._settings.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Unread(_closing("connection closed before the body ended", 400))
                    parts.append(message.get("body", b""))
                    length += len(parts[-1])
                    if length > most:
                        raise _Unread(_closing(f"body: must be at most {most} bytes", 413))
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            said = f"body: must arrive within {self._settings.body_s:g} s"
            raise _Unread(_closing(said, 408)) from None


def app(
    directory: Directory,
    rooms: RoomTable,
    clock: Clock,
    settings: DirectorySettings | None = None,
    metrics: BootstrapMetrics | None = None,
    registry: CollectorRegistry | None = None,
) -> BootstrapApp:
    """One rank directory as an ASGI app; GET /metrics is there when a registry is given."""
    settings = settings or DirectorySettings()
    return BootstrapApp(directory, rooms, clock, settings, metrics, registry)


def _closing(text: str, status: int) -> Answer:
    return Answer(status, text.encode(), headers=(("connection", "close"),))


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(value.decode("latin-1"))
    return None


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

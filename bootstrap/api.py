"""Bootstrap API: the rank directory over HTTP, as engines speak it, and a view for people.

Door: bare ASGI, because the bytes are fixed by SGLang 0.5.23. Below it lookups.py, answers.py and
engine_info.py, which word every answer, and access.py, which says who may write; above it whoever
runs a port. Open it to add a route.

    PUT, GET /route   POST /register_dp_rank   POST /query_dp_ranks   GET /health      as SGLang
    PUT /register_transfer_engine_info   GET /get_transfer_engine_info                 as SGLang
    POST /forget_rooms   GET /ranks   GET /metrics   `Prefer: wait=N` on queries       ours
    headers x-kvplane-generation on every answer, x-kvplane-missing, x-kvplane-differing
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvplane.runtime import Clock

from . import answers, engine_info
from .access import refusal, writer
from .bodies import Bodies, Receive, Scope, Unread, headers_of
from .directory import Accepted, Directory
from .engine_info import EngineInfos
from .errors import BadInput, BootstrapError, Inconsistent, LateLife
from .lookups import Lookups
from .metrics import BootstrapMetrics
from .polls import Outcome, Polls
from .registration import Registration
from .replies import (
    DIFFERING,
    GENERATION,
    NOT_FOUND,
    OK,
    WRONG_ROUTE_METHOD,
    Answer,
    Headers,
    listed,
    said,
    told,
    with_headers,
    wrong_method,
)
from .rooms import RoomTable
from .settings import DirectorySettings

log = logging.getLogger(__name__)

STATUS: dict[type[BootstrapError], tuple[int, str]] = {  # and why, of a closed set
    BadInput: (400, "input"),
    Inconsistent: (400, "differs"),
    LateLife: (409, "late_life"),
}
ENGINE_INFO = ("/register_transfer_engine_info", "/get_transfer_engine_info")
APPLIED: Headers = (("preference-applied", "wait"),)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Handler = Callable[[Scope, Receive], Awaitable[Answer]]


class BootstrapApp:
    """ASGI app over one directory and one room table; as a Part it lets go of waiting polls."""

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
        self._lookups, self._bodies = Lookups(directory), Bodies(settings)
        self.polls = Polls(clock, settings.most_polls)
        self._infos = EngineInfos(settings.most_engine_infos_bytes)
        self._generation = ("", b"")  # text and bytes of the header
        self._routes = self._table()
        if metrics is not None:
            self._watch(metrics)

    def _table(self) -> dict[str, dict[str, Handler]]:
        found: dict[str, dict[str, Handler]] = {
            "/route": {"GET": self._lookup, "PUT": self._writing(self._register)},
            "/register_dp_rank": {"POST": self._writing(self._register_room)},
            "/query_dp_ranks": {"POST": self._query_rooms},
            "/forget_rooms": {"POST": self._writing(self._forget_rooms)},
            "/health": {"GET": self._health, "HEAD": self._health},
            "/ranks": {"GET": self._ranks, "HEAD": self._ranks},
            ENGINE_INFO[0]: {"PUT": self._writing(self._register_info)},
            ENGINE_INFO[1]: {"GET": self._lookup_info},
        }
        if self._registry is not None:
            found["/metrics"] = {"GET": self._scrape, "HEAD": self._scrape}
        return found

    async def start(self) -> None:
        """Questions may wait."""
        await self.polls.start()

    async def stop(self) -> None:
        """Answer those that wait, so that the port can close."""
        await self.polls.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            answer = await self._answer(scope, receive)
            if self._metrics is not None:
                path = scope["path"]
                self._metrics.answered(path if path in self._routes else "other", answer.status)
            await self._send(scope, send, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        path = scope["path"]
        handlers = self._routes.get(path)
        if handlers is None:
            return NOT_FOUND
        handler = handlers.get(scope["method"])
        if handler is None:
            return _wrong_method(path, ",".join(handlers))
        try:
            return await handler(scope, receive)
        except Unread as stop:
            self._refused(scope, stop.reason, stop.answer.body.decode())
            return stop.answer
        except tuple(STATUS) as error:
            status, why = next(s for kind, s in STATUS.items() if isinstance(error, kind))
            self._refused(scope, why, str(error))
            differing = getattr(error, "differing", ())
            return said(str(error), status, headers=listed(DIFFERING, differing))

    def _writing(self, handler: Handler) -> Handler:
        """Only for callers that may write."""

        async def checked(scope: Scope, receive: Receive) -> Answer:
            refused = refusal(self._settings, writer(scope))
            if refused is None:
                return await handler(scope, receive)
            await self._bodies.skip(receive)
            self._refused(scope, refused.reason, refused.text)
            asked = (("www-authenticate", "Bearer"),) if refused.status == 401 else ()
            return said(refused.text, refused.status, headers=asked)

        return checked

    def _refused(self, scope: Scope, why: str, text: str) -> None:
        client = scope.get("client") or ("-",)
        log.info("request refused path=%s client=%s reason=%s", scope["path"], client[0], text)
        if self._metrics is not None:
            self._metrics.refused.labels(why).inc()

    async def _send(self, scope: Scope, send: Send, answer: Answer) -> None:
        generation = self._directory.generation
        if generation != self._generation[0]:
            self._generation = (generation, generation.encode())
        headers = [*answer.raw, (GENERATION.encode(), self._generation[1])]
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await send(start)
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _lookup(self, scope: Scope, receive: Receive) -> Answer:
        return self._lookups.answer(scope["query_string"], self._clock.now())

    async def _register(self, scope: Scope, receive: Receive) -> Answer:
        raw = await self._bodies.read(receive)
        life = headers_of(scope, GENERATION)
        new = answers.registration(raw, life[0] if life else None)
        now = self._clock.now()
        done = self._directory.register(new, now)
        self._tell(new, done, now)
        return with_headers(OK, listed(DIFFERING, done.differing))

    def _tell(self, new: Registration, done: Accepted, now: float) -> None:
        text = answers.accepted_text(new, done, self._directory, now)
        if done.replaced is not None or done.differing:
            log.warning("rank registered differing=%s %s", "; ".join(done.differing) or "-", text)
        else:  # ranks say it every few seconds while another one is missing
            log.log(logging.DEBUG if done.again else logging.INFO, "rank registered %s", text)
        if self._metrics is not None:
            self._metrics.lives.inc(done.new_life)
            self._metrics.takeovers.inc(done.replaced is not None)
            self._metrics.differing.inc(bool(done.differing))

    async def _register_room(self, scope: Scope, receive: Receive) -> Answer:
        raw = await self._bodies.read(receive)
        self.polls.told(answers.register_room(self._rooms, raw, self._clock.now()))
        return OK

    async def _query_rooms(self, scope: Scope, receive: Receive) -> Answer:
        asked = answers.asked_rooms(await self._bodies.read(receive))
        wait_s = answers.preferred_wait(headers_of(scope, "prefer"), self._settings.most_poll_s)
        applied: Headers = ()
        if wait_s > 0:
            known = self._rooms.query(asked, self._clock.now())
            outcome = await self._wait(
                [room for room in asked if room not in known], wait_s, receive
            )
            applied = () if outcome is Outcome.BUSY else APPLIED
        return answers.known_rooms(self._rooms, asked, self._clock.now(), applied)

    async def _wait(self, missing: list[int], wait_s: float, receive: Receive) -> Outcome:
        if not missing:
            return Outcome.TOLD

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        outcome = await self.polls.wait(missing, wait_s, left)
        if self._metrics is not None:
            self._metrics.polls.labels(outcome.value).inc()
        return outcome

    async def _forget_rooms(self, scope: Scope, receive: Receive) -> Answer:
        asked = answers.asked_rooms(await self._bodies.read(receive))
        return answers.forgotten_rooms(self._rooms, asked)

    async def _register_info(self, scope: Scope, receive: Receive) -> Answer:
        raw = await self._bodies.read(receive, self._settings.most_engine_info_bytes)
        answer, rank = self._infos.register(raw)
        if rank is None:
            self._refused(scope, "input", answer.body.decode())
        else:
            session = self._infos.session(rank)
            log.info("engine info registered rank=%d session=%.100r", rank, session)
        return answer

    async def _lookup_info(self, scope: Scope, receive: Receive) -> Answer:
        return self._infos.lookup(scope["query_string"])

    async def _health(self, scope: Scope, receive: Receive) -> Answer:
        return OK

    async def _ranks(self, scope: Scope, receive: Receive) -> Answer:
        clock = self._clock
        return told(answers.ranks(self._directory, self._rooms, clock.now(), clock.wall()))

    async def _scrape(self, scope: Scope, receive: Receive) -> Answer:
        assert self._registry is not None, "route without a registry"
        return Answer(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)

    def _watch(self, metrics: BootstrapMetrics) -> None:
        rooms, infos, now = self._rooms, self._infos, self._clock.now
        metrics.watch(
            rooms=lambda: float(len(rooms)),
            rooms_pushed_out=lambda: float(rooms.pushed_out),
            rooms_expired=lambda: float(rooms.expired),
            rooms_forgotten=lambda: float(rooms.forgotten),
            polls_waiting=lambda: float(len(self.polls)),
            ranks_missing=lambda: float(len(self._directory.missing(now()))),
            engine_infos=lambda: float(len(infos)),
            engine_infos_bytes=lambda: float(infos.bytes),
            bodies_bytes=lambda: float(self._bodies.held),
        )


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


def _wrong_method(path: str, allow: str) -> Answer:
    if path == "/route":
        return WRONG_ROUTE_METHOD
    return engine_info.wrong_method(allow) if path in ENGINE_INFO else wrong_method(allow)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

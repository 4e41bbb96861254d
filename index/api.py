"""Api: the index over HTTP.

Door: paths become our nouns, our errors become OpenAI-shaped answers; answers.py says what is in
them. POST /rank is desk.py, which stands in front; GET /changes is events/api.py. Open it to add a
route.

    POST /rank    GET /workers    GET /workers/{id}    GET /blocks/{hash}    GET /stats
    GET /snapshot?worker=    (snapshots.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvplane.runtime import Clock, SystemClock
from kvplane.vocabulary import Worker, WorkerUp

from . import answers, snapshots
from .chains import Chains
from .desk import Desk, Tokenize, check_known, loaded, place
from .documented import DOCUMENTED
from .errors import BadValue
from .follower import Follower
from .hashing import from_hex
from .metrics import IndexMetrics
from .refusals import JSON, Refusal, body, headers, refused
from .settings import IndexSettings
from .view import View


class _Routes:
    """What every route needs."""

    def __init__(
        self,
        view: View,
        follower: Follower,
        fleet: Callable[[], Sequence[WorkerUp]],
        settings: IndexSettings,
        clock: Clock,
        desk: Desk,
        doubts: Callable[[], answers.Doubts],
    ) -> None:
        self._view, self._follower, self._fleet = view, follower, fleet
        self._settings, self._clock, self._desk = settings, clock, desk
        self._doubts = doubts
        self._sending = 0  # snapshots on their way

    async def rank(self, request: Request) -> Response:
        """Who holds how much of this prompt, deepest first. Hashes and tokens may come packed too:
        8 and 4 bytes each, little-endian, as `application/vnd.kvplane.hashes` and `.tokens`."""
        status, said = await self._desk.answer(request.scope, request.receive)
        return _answer(status, said)

    async def workers(self, request: Request) -> Response:
        """All workers and how far they are known."""
        fleet = self._known_fleet()
        listed = [self._worker(one, fleet) for one in answers.everybody(self._view, fleet)]
        return _json({"workers": listed, **place(self._follower)})

    async def one_worker(self, request: Request) -> Response:
        """One worker, by pod or pod@rank."""
        fleet = self._known_fleet()
        one = _parse(request.path_params["worker"], "worker")
        check_known(one, self._view, fleet, "worker")
        return _json(self._worker(one, fleet))

    async def block(self, request: Request) -> Response:
        """Who holds one block."""
        one = from_hex(request.path_params["block"])
        return _json(answers.block(self._view, self._known_fleet(), one))

    async def stats(self, request: Request) -> Response:
        """Totals, bytes, lag."""
        ready, away_s = self._follower.ready.is_set(), self._follower.down_s()
        found = answers.stats(self._view)
        return _json(
            {**found, **place(self._follower), "ready": ready, "store_down_s": round(away_s, 1)}
        )

    async def snapshot(self, request: Request) -> Response:
        """All blocks of one worker, or of all, with the cursor to go on from."""
        loaded(self._follower)
        packed = snapshots.packed(accept := request.headers.get("accept", ""))
        name = request.query_params.get("worker")
        one = _parse(name, "worker") if name else None
        if one is not None and self._view.facts(one) is None:
            raise Refusal(404, "worker_not_found", f"worker: {one} holds nothing here", "worker")
        if packed is None:
            want = f"{snapshots.LINES} or {snapshots.MSGPACK}"
            said = f"accept {accept!r:.100}: must be {want}"
            raise Refusal(406, "invalid_request", said, "accept")
        if self._sending >= (most := self._settings.snapshots):
            raise Refusal(429, "overloaded", f"{most} snapshots are on their way; ask again in 1 s")
        follower, view, before = self._follower, self._view, self._follower.emptied

        def whole() -> bool:
            return follower.emptied == before

        pieces = (
            snapshots.of_all(view, lambda: follower.cursor, whole, packed, self._believed)
            if one is None
            else snapshots.of_one(view, one, follower.cursor, packed)
        )
        self._sending += 1
        return snapshots.Sending(pieces, packed, self._sent)

    def _sent(self) -> None:
        self._sending -= 1

    def _believed(self, one: Worker) -> dict[str, Any]:
        away_s = self._follower.down_s()
        state, reason = answers.trust(self._view, self._known_fleet(), one, away_s, self._doubts())
        return {"knowledge": state, "reason": reason}

    def _known_fleet(self) -> dict[Worker, WorkerUp]:
        return answers.fleet_of(self._fleet())

    def _worker(self, one: Worker, fleet: answers.Fleet) -> dict[str, Any]:
        away_s = self._follower.down_s()
        now, doubts = self._clock.wall(), self._doubts()
        return answers.worker(self._view, fleet, one, now, away_s, doubts)


class IndexApp(FastAPI):
    """The routes, and the desk before them: to find a route costs more than to answer."""

    desk: Desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST"
        if asks and scope["path"] == scope.get("root_path", "") + "/rank":
            await self.desk(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def index_app(
    view: View,
    follower: Follower,
    *,
    fleet: Callable[[], Sequence[WorkerUp]] = tuple,
    tokenize: Tokenize | None = None,
    metrics: IndexMetrics | None = None,
    settings: IndexSettings | None = None,
    clock: Clock | None = None,
    chains: Chains | None = None,
    doubts: Callable[[], answers.Doubts] = dict[Worker, Any],
) -> IndexApp:
    """The routes of interface.md section 4, /changes excepted. `fleet` says whom discovery sees,
    `doubts` what else is held against a worker: the worse word is shown."""
    settings, clock, chains = (
        settings or IndexSettings(),
        clock or SystemClock(),
        chains or Chains(),
    )
    text = "Who holds which KV blocks."  # FastAPI's own page of it would come from elsewhere
    app = IndexApp(title="kvplane index", description=text, docs_url=None, redoc_url=None)
    app.desk = Desk(view, follower, fleet, tokenize, metrics, settings, clock, chains, doubts)
    routes = _Routes(view, follower, fleet, settings, clock, app.desk, doubts)
    for path, route in (
        ("/rank", routes.rank),
        ("/workers", routes.workers),
        ("/workers/{worker:path}", routes.one_worker),
        ("/blocks/{block}", routes.block),
        ("/stats", routes.stats),
        ("/snapshot", routes.snapshot),
    ):
        methods, told = ["POST" if path == "/rank" else "GET"], DOCUMENTED.get(path)
        app.add_api_route(path, route, methods=methods, response_model=None, openapi_extra=told)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(BadValue, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    return app


def _parse(text: str, param: str) -> Worker:
    try:
        return Worker.parse(text)
    except ValueError as error:
        raise Refusal(400, "invalid_request", str(error), param) from None


def _json(said: Any) -> Response:
    return _answer(200, msgspec.json.encode(said))


def _answer(status: int, said: bytes) -> Response:
    return Response(said, status, headers(status), JSON)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal | BadValue), "registered for them"
    return _answer(*refused(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else "invalid_request"
    answer = _answer(error.status_code, body(error.status_code, code, message, None))
    answer.headers.update(error.headers or {})
    return answer

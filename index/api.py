"""Api: the index over HTTP.

Door: bodies and paths become our nouns, our errors become OpenAI-shaped answers; question.py reads,
answers.py writes. GET /changes is events/api.py. Open it to add a route.

    POST /rank    GET /workers    GET /workers/{id}    GET /blocks/{hash}    GET /stats
    GET /snapshot?worker=    (snapshots.py)

A salt keeps tenants apart and may be a secret: no answer, log or metric shows it in clear.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvplane.runtime import Clock, SystemClock
from kvplane.vocabulary import PrefixChain, Worker, WorkerUp

from . import answers, question, snapshots
from .errors import BadValue
from .follower import Follower
from .hashing import from_hex
from .metrics import IndexMetrics
from .settings import IndexSettings
from .view import View

Tokenize = Callable[[Mapping[str, Any]], Awaitable[Sequence[int]]]

IN_THREAD_BYTES = 256 * 1024  # larger bodies are read off the event loop
HIDDEN = ("body", "salt")  # what was wrong there is not shown: it may hold a salt


class Refusal(Exception):
    """An answer that is an error: status, code and the member it is about."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class _Routes:
    """What every route needs."""

    def __init__(
        self,
        view: View,
        follower: Follower,
        fleet: Callable[[], Sequence[WorkerUp]],
        tokenize: Tokenize | None,
        metrics: IndexMetrics | None,
        settings: IndexSettings,
        clock: Clock,
    ) -> None:
        self._view, self._follower, self._tokenize = view, follower, tokenize
        self._fleet, self._metrics = fleet, metrics
        self._settings, self._clock = settings, clock
        self._sending = 0  # snapshots on their way

    async def rank(self, request: Request) -> Response:
        """Who holds how much of this prompt, deepest first."""
        data = await self._body(request)
        self._loaded()
        large = len(data) > IN_THREAD_BYTES
        asked = await _aside(large, question.read, data, self._settings.most_hashes)
        if asked.text is not None:
            asked = replace(asked, tokens=tuple(await self._tokens(asked.text)))
        fleet, begun = self._known_fleet(), self._clock.now()
        asked = _meant(asked, fleet)
        self._check(asked.workers, fleet)
        chains = await _aside(large, question.chains, asked, self._sizes(fleet))
        answer = self._ranking(chains, asked, fleet)
        if self._metrics:
            self._metrics.rank_seconds.observe(self._clock.now() - begun)
        return _json(answer)

    def _ranking(
        self, chains: dict[int, PrefixChain], asked: question.Question, fleet: answers.Fleet
    ) -> dict[str, Any]:
        away_s = self._follower.down_s()
        shown = {size: _masked(chain) for size, chain in chains.items()}
        found = answers.ranking(self._view, fleet, shown, asked.workers, away_s)
        listed = found.pop("workers")
        return {**found, **self._place(), "workers": listed}

    async def workers(self, request: Request) -> Response:
        """All workers and how far they are known."""
        fleet = self._known_fleet()
        listed = [self._worker(one, fleet) for one in answers.everybody(self._view, fleet)]
        return _json({"workers": listed, **self._place()})

    async def one_worker(self, request: Request) -> Response:
        """One worker, by pod or pod@rank."""
        fleet = self._known_fleet()
        one = _parse(request.path_params["worker"], "worker")
        self._check([one], fleet, "worker")
        return _json(self._worker(one, fleet))

    async def block(self, request: Request) -> Response:
        """Who holds one block."""
        one = from_hex(request.path_params["block"])
        return _json(answers.block(self._view, self._known_fleet(), one))

    async def stats(self, request: Request) -> Response:
        """Totals, bytes, lag."""
        ready, away_s = self._follower.ready.is_set(), self._follower.down_s()
        found = answers.stats(self._view)
        return _json({**found, **self._place(), "ready": ready, "store_down_s": round(away_s, 1)})

    async def snapshot(self, request: Request) -> Response:
        """All blocks of one worker, or of all, with the cursor to go on from."""
        self._loaded()
        packed = snapshots.packed(request.headers.get("accept", ""))
        name = request.query_params.get("worker")
        one = _parse(name, "worker") if name else None
        if one is not None and self._view.facts(one) is None:
            raise Refusal(404, "worker_not_found", f"worker: {one} holds nothing here", "worker")
        if packed is None:
            want = f"{snapshots.LINES} or {snapshots.MSGPACK}"
            raise Refusal(406, "invalid_request", f"accept: must be {want}", "accept")
        if self._sending >= (most := self._settings.snapshots):
            raise Refusal(429, "overloaded", f"{most} snapshots are on their way; ask again in 1 s")
        follower, view = self._follower, self._view
        pieces = (
            snapshots.of_all(view, lambda: follower.cursor, packed, self._believed)
            if one is None
            else snapshots.of_one(view, one, follower.cursor, packed)
        )
        self._sending += 1
        return snapshots.Sending(pieces, packed, self._sent)

    def _sent(self) -> None:
        self._sending -= 1

    def _believed(self, one: Worker) -> dict[str, Any]:
        away_s = self._follower.down_s()
        state, reason = answers.trust(self._view, self._known_fleet(), one, away_s)
        return {"knowledge": state, "reason": reason}

    def _place(self) -> dict[str, Any]:
        return {"cursor": self._follower.cursor, "lag_ms": round(self._follower.lag_ms(), 1)}

    def _loaded(self) -> None:
        if not self._follower.ready.is_set():
            raise Refusal(503, "index_loading", "the index is not loaded yet; ask again in 1 s")

    def _known_fleet(self) -> dict[Worker, WorkerUp]:
        return answers.fleet_of(self._fleet())

    def _worker(self, one: Worker, fleet: answers.Fleet) -> dict[str, Any]:
        away_s = self._follower.down_s()
        return answers.worker(self._view, fleet, one, self._clock.wall(), away_s)

    def _sizes(self, fleet: answers.Fleet) -> list[int]:
        told = {up.block_size for up in fleet.values() if up.block_size}
        return sorted({*self._view.block_sizes(), *told}) or [self._settings.block_size]

    def _check(
        self, asked: Sequence[Worker] | None, fleet: answers.Fleet, param: str = "workers"
    ) -> None:
        for at, one in enumerate(asked or ()):
            if one not in fleet and self._view.facts(one) is None:
                where = param if param == "worker" else f"{param}[{at}]"
                message = f"{where}: {one} is not known; GET /workers lists those that are"
                raise Refusal(404, "worker_not_found", message, where)

    async def _tokens(self, body: Mapping[str, Any]) -> Sequence[int]:
        if self._tokenize is None:
            way = "prompt" if body.get("prompt") is not None else "messages"
            want = "token_ids or block_hashes: this process has no tokenizer (--tokenizer PATH)"
            raise Refusal(400, "invalid_request", f"{way}: send {want}", way)
        try:
            return await self._tokenize(body)
        except ValueError as error:  # the tokenizer's own refusals; never shows the prompt
            raise Refusal(400, "invalid_request", f"prompt cannot be tokenised: {error}") from error

    async def _body(self, request: Request) -> bytes:
        most, parts, size = self._settings.body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise Refusal(413, "invalid_request", f"body: must be at most {most} bytes")
            parts.append(part)
        return b"".join(parts)


def index_app(
    view: View,
    follower: Follower,
    *,
    fleet: Callable[[], Sequence[WorkerUp]] = tuple,
    tokenize: Tokenize | None = None,
    metrics: IndexMetrics | None = None,
    settings: IndexSettings | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """The routes of interface.md section 4, /changes excepted. `fleet` says whom discovery sees."""
    routes = _Routes(
        view,
        follower,
        fleet,
        tokenize,
        metrics,
        settings or IndexSettings(),
        clock or SystemClock(),
    )
    app = FastAPI(title="kvplane index", description="Who holds which KV blocks.")
    app.add_api_route("/rank", routes.rank, methods=["POST"], response_model=None)
    app.add_api_route("/workers", routes.workers, response_model=None)
    app.add_api_route("/workers/{worker:path}", routes.one_worker, response_model=None)
    app.add_api_route("/blocks/{block}", routes.block, response_model=None)
    app.add_api_route("/stats", routes.stats, response_model=None)
    app.add_api_route("/snapshot", routes.snapshot, response_model=None)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(BadValue, _bad_value)
    app.add_exception_handler(HTTPException, _no_route)
    return app


async def _aside(aside: bool, work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(work, *arguments) if aside else work(*arguments)


def _parse(text: str, param: str) -> Worker:
    try:
        return Worker.parse(text)
    except ValueError as error:
        raise Refusal(400, "invalid_request", str(error), param) from None


def _meant(asked: question.Question, fleet: answers.Fleet) -> question.Question:
    """An adapter may be named as the model, as at the gateway. Refuses a name nobody serves, where
    everybody says what he serves."""
    served = {up.model for up in fleet.values()}
    if asked.hashes is not None or asked.model in served or not served or "" in served:
        return asked
    bases = {name: up.model for up in fleet.values() for name in up.adapters}
    if asked.model in bases:
        return replace(asked, model=bases[asked.model], adapter=asked.adapter or asked.model)
    names = ", ".join(sorted({*served, *bases}))
    message = f"model: {asked.model!r} is not served here; served are {names}"
    raise Refusal(404, "model_not_found", message, "model")


def _masked(chain: PrefixChain) -> PrefixChain:
    """As it is shown: equal salts look equal, and are not to be read."""
    space = chain.namespace
    if not space.salt:
        return chain
    digest = hashlib.sha256(space.salt.encode(errors="surrogatepass")).hexdigest()[:8]
    return replace(chain, namespace=replace(space, salt=f"salt:{digest}"))


def _json(body: Any, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(msgspec.json.encode(body), status, headers, snapshots.JSON)


def _error(status: int, code: str, message: str, param: str | None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": message, "type": kind, "code": code, "param": param}
    return _json({"error": said}, status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), "registered for it"
    return _error(error.status, error.code, str(error), error.param)


async def _bad_value(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadValue), "registered for it"
    hidden = error.field.partition("[")[0].partition(".")[0] in HIDDEN
    said = f"{error.field}: must be {error.want}" if hidden else str(error)
    return _error(400, "invalid_request", said, error.field)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else "invalid_request"
    answer = _error(error.status_code, code, message, None)
    answer.headers.update(error.headers or {})
    return answer

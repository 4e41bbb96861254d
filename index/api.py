"""Api: the index over HTTP.

Door: bodies and paths become our nouns, our errors become OpenAI-shaped answers; question.py reads,
answers.py writes. GET /changes is events/api.py. Open it to add a route.

    POST /rank    GET /workers    GET /workers/{id}    GET /blocks/{hash}    GET /stats
    GET /snapshot?worker=    (JSON lines, or msgpack objects one after the other)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from kvplane.runtime import Clock, SystemClock
from kvplane.vocabulary import PrefixChain, Worker, WorkerUp

from . import answers, question
from .errors import BadValue
from .follower import Follower
from .hashing import from_hex
from .metrics import IndexMetrics
from .settings import IndexSettings
from .view import View

Tokenize = Callable[[Mapping[str, Any]], Awaitable[Sequence[int]]]

IN_THREAD_BYTES = 256 * 1024  # larger bodies are read off the event loop
JSON, LINES, MSGPACK = "application/json", "application/x-ndjson", "application/msgpack"


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

    async def rank(self, request: Request) -> Response:
        """Who holds how much of this prompt, deepest first."""
        data = await self._body(request)
        self._loaded()
        large = len(data) > IN_THREAD_BYTES
        asked = await _aside(large, question.read, data, self._settings.most_hashes)
        if asked.text is not None:
            asked = replace(asked, tokens=tuple(await self._tokens(asked.text)))
        fleet, begun = self._known_fleet(), self._clock.now()
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
        found = answers.ranking(self._view, fleet, chains, asked.workers, away_s)
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
        """All blocks of one worker, with the cursor they are true at."""
        self._loaded()
        if not (name := request.query_params.get("worker")):
            raise Refusal(400, "invalid_request", "worker: missing, say ?worker=POD", "worker")
        one = _parse(name, "worker")
        if self._view.facts(one) is None:
            raise Refusal(404, "worker_not_found", f"worker: {one} holds nothing here", "worker")
        packed = _wants_msgpack(request.headers.get("accept", ""))
        lines = answers.snapshot(self._view, one, self._follower.cursor, not packed)
        return StreamingResponse(_encoded(lines, packed), media_type=MSGPACK if packed else LINES)

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


def _wants_msgpack(accept: str) -> bool:
    kinds = [kind.partition(";")[0].strip().lower() for kind in accept.split(",") if kind.strip()]
    for kind in kinds or ["*/*"]:
        if kind in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
            return True
        if kind in ("*/*", "application/*", JSON, LINES, "application/jsonl", "text/plain"):
            return False
    raise Refusal(406, "invalid_request", f"accept: must be {LINES} or {MSGPACK}", "accept")


def _encoded(lines: Iterator[Mapping[str, Any]], packed: bool) -> Iterator[bytes]:
    for line in lines:
        yield msgspec.msgpack.encode(line) if packed else msgspec.json.encode(line) + b"\n"


def _json(body: Any, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(msgspec.json.encode(body), status, headers, JSON)


def _error(status: int, code: str, message: str, param: str | None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": message, "type": kind, "code": code, "param": param}
    return _json({"error": said}, status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), "registered for it"
    return _error(error.status, error.code, str(error), error.param)


async def _bad_value(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadValue), "registered for it"
    return _error(400, "invalid_request", str(error), error.field)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else "invalid_request"
    answer = _error(error.status_code, code, message, None)
    answer.headers.update(error.headers or {})
    return answer

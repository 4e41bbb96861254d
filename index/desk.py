"""Desk: POST /rank, asked thousands of times a second, so answered without a framework between.

Door: ASGI in, ASGI out. question.py reads what is asked, ranking.py judges, lines.py writes it,
refusals.py says what was wrong. api.py puts it in front of its routes. Open it to change the way of
a question through the process.

    body -> loaded? -> Question -> tokens of a text -> model and workers known? -> chains -> lines

A salt keeps tenants apart and may be a secret: no answer, log or metric shows it in clear.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kvplane.runtime import Clock
from kvplane.vocabulary import PrefixChain, Worker, WorkerUp

from . import question
from .answers import Doubts
from .chains import Chains
from .errors import BadValue
from .follower import Follower
from .frames import Frames
from .lines import Lines
from .metrics import IndexMetrics
from .refusals import JSON, Refusal, headers, refused
from .roster import Roster, roster
from .settings import IndexSettings
from .view import View

Told = Sequence[tuple[bytes, bytes]]  # headers, names in small letters
Tokenize = Callable[[Mapping[str, Any]], Awaitable[Sequence[int]]]

IN_THREAD_BYTES = 256 * 1024  # larger bodies are read off the event loop

_encode = msgspec.json.Encoder().encode
_WHERE = b'"cursor":%b,"lag_ms":%.1f,'  # as place() says it, within an answer


class Desk:
    """Answers one kind of question, about one view."""

    def __init__(
        self,
        view: View,
        follower: Follower,
        fleet: Callable[[], Sequence[WorkerUp]],
        tokenize: Tokenize | None,
        metrics: IndexMetrics | None,
        settings: IndexSettings,
        clock: Clock,
        chains: Chains,
        doubts: Callable[[], Doubts] = dict[Worker, Any],
    ) -> None:
        self._view, self._follower, self._tokenize = view, follower, tokenize
        self._fleet, self._metrics, self._chains = fleet, metrics, chains
        self._settings, self._clock = settings, clock
        self._lines = Lines(view, doubts)
        self._roster, self._turn, self._sizes = Roster(()), -1, list[int]()  # while both stay so
        self._frames = Frames(settings.most_hashes, chains.texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One question, one answer."""
        status, body = await self.answer(scope, receive)
        await send(
            {"type": "http.response.start", "status": status, "headers": _head(status, body)}
        )
        await send({"type": "http.response.body", "body": body})

    async def answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        """Status and body: who holds how much of this prompt, deepest first."""
        return await self._waited(scope["headers"], b"?" + scope["query_string"], receive)

    def direct(self, cycle: Any) -> Coroutine[Any, Any, None] | None:
        """The same without ASGI between, for our own server: a Cycle of cycle.py. At once, where
        all of the body came, and there is nothing to tokenise."""
        if cycle.more_body or cycle.size > IN_THREAD_BYTES:
            return self._later(cycle)
        try:
            data = cycle.take()
            if len(data) > self._settings.body_bytes:
                raise self._too_large()
            loaded(self._follower)
            asked = self._read(cycle.headers, cycle.url, data)
            if asked.text is not None:
                return self._later(cycle, asked)
            status, body = 200, self._found(asked)
            if cycle.say(_READY, body):
                return None
        except (Refusal, BadValue) as error:
            status, body = refused(error)
        return _say(cycle, status, body)

    async def _later(self, cycle: Any, asked: question.Question | None = None) -> None:
        told = await self._waited(cycle.headers, cycle.url, cycle.receive, asked)
        await _say(cycle, *told)

    async def _waited(
        self, told: Told, url: bytes, receive: Receive, asked: question.Question | None = None
    ) -> tuple[int, bytes]:
        try:
            data = await self._body(receive) if asked is None else b""
            loaded(self._follower)
            large = len(data) > IN_THREAD_BYTES
            if asked is None:
                read, body = self._read, (told, url, data)
                asked = await asyncio.to_thread(read, *body) if large else read(*body)
            if asked.text is not None:
                tokens = await self._tokens(asked.text)
                asked = msgspec.structs.replace(asked, tokens=tokens)
            if not large:
                return 200, self._found(asked)
            begun, (asked, sizes, _) = self._clock.now(), self._meant(asked)
            # Hashed whole, where it holds up nobody; others as far as they are held.
            chains = await asyncio.to_thread(question.chains, asked, sizes, self._chains.chain)
            asked, _, seen = self._meant(asked)  # some may have gone meanwhile
            return 200, self._told(chains, asked, seen, begun)
        except (Refusal, BadValue) as error:
            return refused(error)

    def _read(self, told: Told, url: bytes, data: bytes) -> question.Question:
        for name, value in told:
            if name == b"content-type" and value != b"application/json":
                packed = _PACKED.get(value.lower().partition(b";")[0].rstrip())
                if packed is not None:
                    query = url.partition(b"?")[2].decode("latin-1")
                    return packed(data, query, self._settings.most_hashes)
        return self._frames.read(data)

    def _found(self, asked: question.Question) -> bytes:
        begun, (asked, sizes, seen) = self._clock.now(), self._meant(asked)
        chains = question.chains(asked, sizes, self._chains.unrolled)
        return self._told(chains, asked, seen, begun)

    def _meant(self, asked: question.Question) -> tuple[question.Question, list[int], Roster]:
        """What is asked in the names that are served, the block sizes in use, who is there."""
        seen, view = roster(self._fleet(), self._roster), self._view
        if seen is not self._roster or view.turn != self._turn:
            self._roster, self._turn = seen, view.turn
            self._sizes = seen.block_sizes(view) or [self._settings.block_size]
        if asked.hashes is None and asked.model not in seen.served:
            asked = meant(asked, seen)
        if asked.workers:
            self._check(asked.workers, seen)
        return asked, self._sizes, seen

    def _told(
        self,
        chains: dict[int, PrefixChain],
        asked: question.Question,
        seen: Roster,
        begun: float,
    ) -> bytes:
        if asked.salt:
            chains = {size: _masked(chain) for size, chain in chains.items()}
        follower = self._follower
        where = _WHERE % (_encode(follower.cursor), follower.lag_ms())
        answer = self._lines.ranking(seen, chains, asked.workers, follower.down_s(), where)
        if self._metrics:
            self._metrics.rank_seconds.observe(self._clock.now() - begun)
        return answer

    def _check(self, workers: Sequence[Worker], seen: Roster) -> None:
        for at, one in enumerate(workers):
            check_known(one, self._view, seen.fleet, f"workers[{at}]")

    async def _tokens(self, body: Mapping[str, Any]) -> Sequence[int]:
        if self._tokenize is None:
            way = "prompt" if body.get("prompt") is not None else "messages"
            want = "token_ids or block_hashes: this process has no tokenizer (--tokenizer PATH)"
            raise Refusal(400, "invalid_request", f"{way}: send {want}", way)
        try:
            return await self._tokenize(body)
        except ValueError as error:  # the tokenizer's own refusals; never shows the prompt
            raise Refusal(400, "invalid_request", f"prompt cannot be tokenised: {error}") from error

    def _too_large(self) -> Refusal:
        most = self._settings.body_bytes
        return Refusal(413, "invalid_request", f"body: must be at most {most} bytes")

    async def _body(self, receive: Receive) -> bytes:
        most, parts, size, more = self._settings.body_bytes, list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise Refusal(400, "invalid_request", "body: its sender left before its end")
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > most:
                raise self._too_large()
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def loaded(follower: Follower) -> None:
    """Refuses while nothing is known yet."""
    if not follower.ready.is_set():
        raise Refusal(503, "index_loading", "the index is not loaded yet; ask again in 1 s")


def place(follower: Follower) -> dict[str, Any]:
    """Where in the stream an answer is true, and how old that is."""
    return {"cursor": follower.cursor, "lag_ms": round(follower.lag_ms(), 1)}


def check_known(one: Worker, view: View, fleet: Mapping[Worker, WorkerUp], param: str) -> None:
    """Refuses a worker that neither discovery nor events told of."""
    if one not in fleet and view.facts(one) is None:
        message = f"{param}: {one} is not known; GET /workers lists those that are"
        raise Refusal(404, "worker_not_found", message, param)


def meant(asked: question.Question, seen: Roster) -> question.Question:
    """Under a model's name that is not among those served: an adapter may be named as the model, as
    at the gateway. Refuses a name nobody serves, where everybody says what he serves."""
    served, bases = seen.served, seen.bases
    if not served or "" in served:
        return asked
    if asked.model in bases:
        adapter = asked.adapter or asked.model
        return msgspec.structs.replace(asked, model=bases[asked.model], adapter=adapter)
    names = ", ".join(sorted({*served, *bases}))
    message = f"model: {asked.model!r} is not served here; served are {names}"
    raise Refusal(404, "model_not_found", message, "model")


def _head(status: int, body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-length", b"%d" % len(body)), *_beside(status)]


@cache
def _beside(status: int) -> list[tuple[bytes, bytes]]:
    told = {"content-type": JSON, **headers(status)}
    return [(name.encode(), value.encode()) for name, value in told.items()]


async def _say(cycle: Any, status: int, body: bytes) -> None:
    """By way of messages, which wait for a client that does not drain."""
    shown = _head(status, body)
    if not cycle.answer(status, shown, body, more=False):
        await cycle.send({"type": "http.response.start", "status": status, "headers": shown})
        await cycle.send({"type": "http.response.body", "body": body})


_READY = b"".join([b"%b: %b\r\n" % pair for pair in _beside(200)])  # as they leave

_PACKED = {
    question.PACKED.encode(): question.read_packed,
    question.PACKED_TOKENS.encode(): question.read_packed_tokens,
}


def _masked(chain: PrefixChain) -> PrefixChain:
    """As it is shown: equal salts look equal, and are not to be read."""
    space = chain.namespace
    digest = hashlib.sha256(space.salt.encode(errors="surrogatepass")).hexdigest()[:8]
    return replace(chain, namespace=replace(space, salt=f"salt:{digest}"))

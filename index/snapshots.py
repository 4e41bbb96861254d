"""Snapshots: GET /snapshot, all blocks of one worker or of all of them.

Door: the view's blocks as JSON lines or msgpack objects, in pieces, so that neither a large worker
nor a slow reader stops anybody. answers.py says what a line holds, api.py mounts it. Open it to
change how a snapshot is sent.

    head of worker a, its stretches, head of worker b, its stretches, ..., {"end": true, ...}

Each worker is read in one step and is true at the cursor of its head; workers follow each other
while changes go on. So whoever goes on with GET /changes hears some of them twice. That is safe:
changes are absolute, and the last one about a block wins. One without its last line is not whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvplane.vocabulary import Cursor, Worker

from . import answers
from .view import View

JSON, LINES, MSGPACK = "application/json", "application/x-ndjson", "application/msgpack"
_PIECE = 64 * 1024  # bytes sent at once; more of them wait for the client
Line = Mapping[str, Any]


def packed(accept: str) -> bool | None:
    """Whether an Accept header wants msgpack; None where it wants what we do not have."""
    kinds = [kind.partition(";")[0].strip().lower() for kind in accept.split(",") if kind.strip()]
    for kind in kinds or ["*/*"]:
        if kind in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
            return True
        if kind in ("*/*", "application/*", JSON, LINES, "application/jsonl", "text/plain"):
            return False
    return None


def of_one(view: View, one: Worker, cursor: Cursor, packed: bool) -> AsyncIterator[bytes]:
    """One worker's head and stretches, as they are now."""
    return iterate_in_threadpool(_pieces(answers.snapshot(view, one, cursor, not packed), packed))


async def of_all(
    view: View,
    cursor: Callable[[], Cursor],
    whole: Callable[[], bool],
    packed: bool,
    more: Callable[[Worker], Line],
) -> AsyncIterator[bytes]:
    """Every worker's, one after the other, and where to go on; `more` is added to its head. Where
    the view is not `whole` any more, of which no change tells, it ends without that."""
    first = cursor()
    for one in view.workers():
        if view.facts(one) is None:
            continue  # gone since we began; the changes say so
        lines = answers.snapshot(view, one, cursor(), not packed)
        head = {**next(lines), **more(one)}
        async for piece in iterate_in_threadpool(_pieces(_after(head, lines), packed)):
            yield piece
        await asyncio.sleep(0)  # a worker without blocks waits for nobody
    if not whole():
        return
    yield _line({"end": True, "cursor": first, "until": cursor()}, packed)


def _after(head: Line, lines: Iterator[Line]) -> Iterator[Line]:
    yield head
    yield from lines


def _pieces(lines: Iterator[Line], packed: bool) -> Iterator[bytes]:
    held, size = list[bytes](), 0
    for line in lines:
        held.append(_line(line, packed))
        size += len(held[-1])
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _line(line: Line, packed: bool) -> bytes:
    return msgspec.msgpack.encode(line) if packed else msgspec.json.encode(line) + b"\n"


class Sending(StreamingResponse):
    """A snapshot on its way; `done` is called when it has ended, however it ended."""

    def __init__(
        self, pieces: AsyncIterator[bytes], packed: bool, done: Callable[[], None]
    ) -> None:
        super().__init__(pieces, media_type=MSGPACK if packed else LINES)
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until all is sent or the client has gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._done()

"""Serving: a flow of pieces as one HTTP answer, whole or streamed.

Door. api.py returns an Answer, the web framework runs it. Whatever happens (failure, client gone,
our own end) the flow is closed, so that no sample goes on for nobody. Open it to change how a
failure looks before or after the first byte.

    failure before the first piece   status and JSON error, also of a stream
    failure after it                 `data: {"error": ...}`, then the end, without [DONE]
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kvplane.runtime import cancel

from .asks import Call
from .errors import CutConnection, EngineError
from .flow import Flow
from .pieces import Piece
from .shapes import DONE, Shape, error_body

log = logging.getLogger(__name__)

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class Answer:
    """The answer to one call; an ASGI app that runs once."""

    def __init__(
        self, call: Call, begin: Callable[[], Flow], end: Callable[[Flow], None], shape: Shape
    ) -> None:
        self._call, self._begin, self._end, self._shape = call, begin, end, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until it is answered or the client is gone."""
        flow = self._begin()
        work = asyncio.create_task(self._serve(flow, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                log.debug("client gone rid=%s action=abort", self._call.rid)
        finally:
            await cancel(work, gone)
            await flow.close()
            self._end(flow)

    async def _serve(self, flow: Flow, send: Send) -> None:
        pieces = flow.pieces()
        try:
            if self._call.stream:
                await self._stream(pieces, send)
            else:
                async for piece in pieces:
                    self._shape.add(piece)
                await self._whole(200, self._shape.whole(), send)
        except CutConnection:
            await _cut(send)
        except EngineError as error:
            await self._whole(error.status, error_body(error), send)

    async def _stream(self, pieces: AsyncIterator[Piece], send: Send) -> None:
        """Raises only what happens before the first piece."""
        first = await anext(pieces)
        await self._start(200, EVENTS, None, send)
        await self._add(first, send)
        try:
            async for piece in pieces:
                await self._add(piece, send)
        except CutConnection:
            return  # an answer without an end: the server closes the connection
        except EngineError as error:
            await _body(send, _event(error_body(error)), more=False)
            return
        tail = b"".join(_event(chunk) for chunk in self._shape.tail())
        await _body(send, tail + DONE, more=False)

    async def _add(self, piece: Piece, send: Send) -> None:
        self._shape.add(piece)
        events = b"".join(_event(chunk) for chunk in self._shape.chunks(piece))
        if events:
            await _body(send, events, more=True)

    async def _whole(self, status: int, content: Any, send: Send) -> None:
        body = msgspec.json.encode(content)
        await self._start(status, JSON, len(body), send)
        await _body(send, body, more=False)

    async def _start(self, status: int, kind: bytes, length: int | None, send: Send) -> None:
        headers = [(b"content-type", kind), (b"x-request-id", self._call.rid.encode("latin-1"))]
        if length is None:
            headers.append((b"cache-control", b"no-cache"))
        else:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _cut(send: Send) -> None:
    """Promise a byte and never send it: the server closes the connection."""
    headers = [(b"content-length", b"1")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})


async def _gone(receive: Receive) -> None:
    """Until the client has left; the body was read before."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


def _event(chunk: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

"""Api: GET /changes, the change stream as server-sent events, resumable by cursor.

Door: turns a reader of broadcast.py into SSE and its errors into status codes. Mounted by
kvplane/doors.py. Open it to change the outside of the stream; records.py has the form of a change.

Nothing is queued here: the next events are taken when the client took the last ones, so a slow
reader costs no memory. One that falls behind the stream's end gets 410, or the event "gone" when
the answer had begun; either way it starts again from a snapshot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvplane.index import BadValue, CursorGone, StoreDown
from kvplane.vocabulary import Cursor

from .broadcast import Broadcast, TooMany
from .reader import Reader

KIND = "text/event-stream"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_STATUS: dict[type[BaseException], tuple[int, str]] = {
    CursorGone: (410, "cursor_gone"),
    BadValue: (400, "invalid_request"),
    StoreDown: (503, "store_down"),
    TooMany: (429, "overloaded"),
}


def routes(broadcast: Broadcast, snapshot: str = "/snapshot") -> list[Route]:
    """The routes of this door; `snapshot` is the path a client that fell behind is sent to."""

    async def changes(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(headers=HEADERS, media_type=KIND)
        told = request.headers.get("last-event-id") or request.query_params.get("after") or ""
        try:
            reader = await broadcast.join(Cursor(told.strip()) if told.strip() else None)
        except tuple(_STATUS) as error:
            return _refusal(error, snapshot)
        return Changes(broadcast, reader)

    return [Route("/changes", changes, methods=["GET"])]


class Changes(StreamingResponse):
    """The answer: endless, with a comment line when nothing happens."""

    def __init__(self, broadcast: Broadcast, reader: Reader) -> None:
        self._broadcast, self._reader = broadcast, reader
        super().__init__(self._events(), media_type=KIND, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the client goes; what the reader had is given back on every path."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._broadcast.leave(self._reader)

    async def _events(self) -> AsyncIterator[bytes]:
        yield f"id: {self._reader.began}\n: changes follow\n\n".encode()
        while True:
            try:
                found = await self._reader.take(self._broadcast.settings.heartbeat_s)
            except tuple(_STATUS) as error:
                yield _event("gone" if isinstance(error, CursorGone) else "error", _body(error))
                return
            yield found or b": nothing new\n\n"


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(body))


def _body(error: BaseException) -> dict[str, Any]:
    status, code = _STATUS[type(error)]
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = "after" if status in (400, 410) else None
    return {"error": {"message": str(error), "type": kind, "code": code, "param": param}}


def _refusal(error: BaseException, snapshot: str) -> JSONResponse:
    status, code = _STATUS[type(error)]
    body = _body(error)
    headers = {"retry-after": "1"} if status == 503 else {}
    if isinstance(error, TooMany):
        headers["retry-after"] = str(error.again_s)
    if code == "cursor_gone":
        body["snapshot"] = snapshot
        headers["link"] = f'<{snapshot}>; rel="snapshot"'
    return JSONResponse(body, status, headers)

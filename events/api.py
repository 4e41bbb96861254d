"""Api: GET /changes, the change stream as server-sent events, resumable by cursor.

Door: turns the store's tail into SSE and its errors into status codes. Mounted by kvplane/doors.py.
Open it to change the outside of the stream; records.py has the form of a change.

Nothing is queued here: the next entry is taken when the client took the last one, so a slow reader
costs no memory. One that falls behind the stream's end gets 410, or the event "gone" when the
answer had begun; either way it starts again from a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvplane.index import BadValue, CursorGone, Entry, Store, StoreDown
from kvplane.runtime import cancel
from kvplane.vocabulary import Cursor

from .records import entry_record
from .settings import EventsSettings

_FIRST_S = 0.25  # a cursor that is gone shows at once; then the answer begins
_STATUS: dict[type[BaseException], tuple[int, str]] = {
    CursorGone: (410, "cursor_gone"),
    BadValue: (400, "invalid_request"),
    StoreDown: (503, "store_down"),
}


def routes(
    store: Store, settings: EventsSettings | None = None, snapshot: str = "/snapshot"
) -> list[Route]:
    """The routes of this door; `snapshot` is the path a client that fell behind is sent to."""
    chosen = settings or EventsSettings()

    async def changes(request: Request) -> Response:
        try:
            after = request.headers.get("last-event-id") or request.query_params.get("after")
            cursor = Cursor(after) if after else await store.head()
            changes = Changes(store.tail(cursor), chosen.heartbeat_s, snapshot)
            await changes.begin(_FIRST_S)
        except tuple(_STATUS) as error:
            return _refusal(error, snapshot)
        return changes

    return [Route("/changes", changes, methods=["GET"])]


class Changes(StreamingResponse):
    """The answer: endless, with a comment line when nothing happens."""

    def __init__(self, entries: AsyncIterator[Entry], heartbeat_s: float, snapshot: str) -> None:
        self._entries, self._heartbeat_s, self._snapshot = entries, heartbeat_s, snapshot
        self._next: asyncio.Task[Entry] | None = None
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def begin(self, wait_s: float) -> None:
        """Ask for the first entry; raises what the store refuses with."""
        self._next = self._ask()
        done, _ = await asyncio.wait({self._next}, timeout=wait_s)
        if done and (error := self._next.exception()) is not None:
            await self._tidy()
            raise error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the client goes; the tail is closed on every path."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._tidy()

    def _ask(self) -> asyncio.Task[Entry]:
        return asyncio.create_task(_following(self._entries))

    async def _events(self) -> AsyncIterator[bytes]:
        yield b": changes follow\n\n"
        while True:
            if self._next is None:
                self._next = self._ask()
            done, _ = await asyncio.wait({self._next}, timeout=self._heartbeat_s)
            if not done:
                yield b": nothing new\n\n"
                continue
            asked, self._next = self._next, None
            try:
                entry = asked.result()
            except tuple(_STATUS) as error:
                yield _event("gone" if isinstance(error, CursorGone) else "error", _body(error))
                return
            yield _event("changes", entry_record(entry), entry.cursor)

    async def _tidy(self) -> None:
        await cancel(cast("asyncio.Task[object] | None", self._next))
        self._next = None
        close = getattr(self._entries, "aclose", None)
        if close is not None:
            await close()


async def _following(entries: AsyncIterator[Entry]) -> Entry:
    try:
        return await anext(entries)
    except StopAsyncIteration:  # may not leave a task
        raise StoreDown("change stream", "it was closed") from None


def _event(name: str, body: dict[str, Any], cursor: str = "") -> bytes:
    head = f"id: {cursor}\n" if cursor else ""
    return f"{head}event: {name}\ndata: {msgspec.json.encode(body).decode()}\n\n".encode()


def _body(error: BaseException) -> dict[str, Any]:
    _, code = _STATUS[type(error)]
    return {"error": {"message": str(error), "type": code, "code": code, "param": "after"}}


def _refusal(error: BaseException, snapshot: str) -> JSONResponse:
    status, code = _STATUS[type(error)]
    body = _body(error)
    headers = {"retry-after": "1"} if status == 503 else {}
    if code == "cursor_gone":
        body["snapshot"] = snapshot
        headers["link"] = f'<{snapshot}>; rel="snapshot"'
    return JSONResponse(body, status, headers)

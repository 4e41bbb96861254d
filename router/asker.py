"""Asker: the client of one inference request, as the rest of router/ sees it.

Edge: bare ASGI on one side, a Client of dispatch.py on the other. api.py makes one per request.
Open it to change how a body is read, how an answer leaves, or how we hear that a client left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.exceptions import HTTPException

from kvplane.tallies import Spread

from .dispatch import ClientGone
from .errors import GatewayError
from .keys import Key
from .legs_exchange import Bell
from .settings import AdmissionSettings

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]
Hold = Callable[[Key, int], None]  # Admission.hold

CYCLE = "kvplane.cycle"  # our own server's way to answer: cycle.py has it
CLOSE = (b"connection", b"close")  # the rest of a body would only be read to be thrown away


class Cycle(Protocol):
    """What our own server offers beside messages."""

    headers: HeaderList
    more_body: bool

    async def receive(self) -> dict[str, Any]: ...
    async def send(self, message: dict[str, Any]) -> None: ...
    def take(self) -> bytes: ...
    def on_leave(self, call: Callable[[], None]) -> None: ...
    def answer(self, status: int, headers: HeaderList, data: bytes, more: bool) -> bool: ...
    def put(self, data: bytes) -> bool: ...
    def relay(self, chunks: bytes) -> bool: ...
    def cut(self) -> None: ...


class AsgiClient:
    """The one who asked."""

    gone = False
    status = 0  # of the answer that began to leave
    held_bytes = 0  # of the body, as `hold` was told
    begun = 0.0  # when it asked, by `now`
    now: Callable[[], float]
    first_s: Spread | None = None  # told how long it was until an answer began to leave
    _head: tuple[int, HeaderList] | None = None  # not sent yet
    watching: asyncio.Task[None] | None = None  # that it leaves, where our server does not tell

    def __init__(self, receive: Receive, send: Send, cycle: Cycle | None = None) -> None:
        self._receive, self._send, self._cycle, self.bell = receive, send, cycle, Bell()

    async def start(self, status: int, headers: HeaderList) -> None:
        """The head; it leaves with the first body bytes."""
        self.status, self._head = status, (status, headers)
        if self.first_s is not None:
            self.first_s.observe(self.now() - self.begun)

    async def write(self, data: bytes, more: bool) -> None:
        """Body bytes; waits while the client does not drain."""
        if self._head is not None:
            (status, headers), self._head = self._head, None
            if self._cycle is not None and self._cycle.answer(status, headers, data, more):
                return
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def answer(self, status: int, headers: HeaderList, data: bytes) -> bool:
        """All of an answer, now; False where it has to be waited for."""
        if self._cycle is None or not self._cycle.answer(status, headers, data, False):
            return False
        self.status = status
        if self.first_s is not None:
            self.first_s.observe(self.now() - self.begun)
        return True

    @property
    def put(self) -> Callable[[bytes], bool]:
        """Lets a part of a stream that began leave now; False where it has to be waited for."""
        return _never if self._cycle is None else self._cycle.put

    @property
    def relay(self) -> Callable[[bytes], bool]:
        """The same of a part that is whole chunks already."""
        return _never if self._cycle is None else self._cycle.relay

    def cut(self) -> None:
        """An answer that began cannot go on. A server that is not ours sees it end too soon."""
        if self._cycle is not None:
            self._cycle.cut()

    async def whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        """A complete answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(body, more=False)

    def body_here(self, most_bytes: int, hold: Hold, key: Key) -> bytes | None:
        """The request's body where it has come already, and it is watched; else None. Raises as
        `body` does."""
        cycle = self._cycle
        if cycle is None or cycle.more_body:
            return None
        body = cycle.take()
        size = len(body)
        if size > most_bytes:
            raise _too_large(most_bytes)
        hold(key, size)
        self.held_bytes = size
        cycle.on_leave(self._left)
        return body

    async def body(
        self, limits: AdmissionSettings, told: Mapping[bytes, bytes], hold: Hold, key: Key
    ) -> bytes:
        """The request's body as it comes; then it is watched. `told` are its headers, `hold` is
        told of each part. Raises GatewayError 413, 408 and what `hold` raises; ClientGone."""
        most, declared = limits.most_body_bytes, told.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        size, loop = 0, asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout(min(limits.body_idle_s, limits.body_s)) as deadline:
                while True:
                    part, more = await self._part()
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    self._hold(len(part), hold, key)
                    parts.append(part)
                    if not more:
                        self.watch()
                        return part if len(parts) == 1 else b"".join(parts)
                    last = begun + limits.body_s + size / limits.body_pace
                    deadline.reschedule(min(loop.time() + limits.body_idle_s, last))
        except TimeoutError:
            took = f"{size} bytes of the body came in {loop.time() - begun:.0f} s, then no more"
            raise GatewayError("request_timeout", took, headers=[CLOSE]) from None

    async def _part(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), bool(message.get("more_body"))

    def _hold(self, size: int, hold: Hold, key: Key) -> None:
        try:
            hold(key, size)
        except GatewayError as error:
            error.headers.append(CLOSE)
            raise
        self.held_bytes += size

    def watch(self) -> None:
        """From now on its leaving wakes whoever serves it, until `unwatch`."""
        if self._cycle is not None:
            self._cycle.on_leave(self._left)
        else:  # a server that is not ours
            self.watching = asyncio.create_task(self._watch())

    def unwatch(self) -> None:
        """It may leave."""
        if self.watching is not None:
            self.watching.cancel()
            self.watching = None  # it holds us: together they would be garbage

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        self.gone = True
        self.bell.ring()


def _never(data: bytes) -> bool:
    """A server that is not ours has to be waited for."""
    return False


def bounded(receive: Receive, most_bytes: int) -> Receive:
    """The same for the app of admin.py, whose bodies are read whole whatever they hold. Raises
    HTTPException 413, which that app answers."""
    size = 0

    async def read() -> dict[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most_bytes:
            text = f"the body is longer than {most_bytes} bytes"
            raise HTTPException(413, text, {"connection": "close"})
        return message

    return read


def _too_large(most_bytes: int) -> GatewayError:
    text = f"the body is longer than {most_bytes} bytes"
    return GatewayError("payload_too_large", text, headers=[CLOSE])

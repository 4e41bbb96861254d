"""Bodies: what comes with a request: its headers, and its body, bounded in size and time.

Edge: reads from ASGI. Used by api.py. Open it to change what one request, or all that are arriving
together, may hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from .replies import Answer, closing
from .settings import DirectorySettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Unread(Exception):
    """The body was not read to its end: what to answer, and that the connection is of no use."""

    def __init__(self, reason: str, answer: Answer) -> None:
        self.reason, self.answer = reason, answer


class Bodies:
    """Reads all bodies of one directory."""

    def __init__(self, settings: DirectorySettings) -> None:
        self._settings = settings
        self.held = 0  # bytes of all bodies that are arriving

    async def read(self, receive: Receive, most: int | None = None) -> bytes:
        """The whole body. Raises Unread."""
        parts: list[bytes] = []
        await self._each(receive, most, parts.append)
        return b"".join(parts)

    async def skip(self, receive: Receive) -> None:
        """Take a body that nobody wants, so that the answer arrives. Raises Unread."""
        await self._each(receive, None, None)

    async def _each(
        self, receive: Receive, most: int | None, keep: Callable[[bytes], None] | None
    ) -> None:
        most = self._settings.most_body_bytes if most is None else most
        length = held = 0
        try:
            async with asyncio.timeout(self._settings.body_s):
                async for part in _parts(receive):
                    length += len(part)
                    if keep is not None:
                        keep(part)
                        held += len(part)
                        self.held += len(part)
                    self._check(length, most)
        except TimeoutError:
            said = f"body: must arrive within {self._settings.body_s:g} s"
            raise Unread("late", closing(said, 408)) from None
        finally:
            self.held -= held

    def _check(self, length: int, most: int) -> None:
        if length > most:
            raise Unread("long", closing(f"body: must be at most {most} bytes", 413))
        if self.held > self._settings.most_bodies_bytes:
            raise Unread("busy", closing("too many bodies are arriving: try again", 429))


def headers_of(scope: Scope, name: str) -> list[str]:
    """All values of a header."""
    wanted = name.encode()
    return [value.decode("latin-1") for key, value in scope["headers"] if key == wanted]


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Unread("cut", closing("connection closed before the body ended", 400))
        yield message.get("body", b"")
        if not message.get("more_body"):
            return

"""Pool: how does a command get an answer from one Redis node, and nobody else's?

Edge: connections of the client library, at most so many, kept between calls. A connection goes back
only after its last answer was read whole; whatever ends a call early (a cancellation, a deadline,
an error of the network) closes it, so no answer is left for who comes next. Open it to change how
connections are made, shared or given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Cut
from redis.exceptions import ResponseError

from .address import Address

Command = Sequence[Any]  # its words: bytes, text or numbers
_HEADS = tuple(b"$%d" % length for length in range(512))  # of a word, by its length


class Pool:
    """At most `most` connections to one node; who finds none free waits, in order of arrival.

    Nothing here has a deadline: line.py puts one around every call, the wait included.
    """

    def __init__(self, make: Callable[[], AbstractConnection], most: int, name: str) -> None:
        self.name = name  # host:port
        self._make = make
        self._free = asyncio.Semaphore(most)
        self._idle: list[AbstractConnection] = []
        self._life = 0  # connections taken before the last drop() are closed when they come back
        self._closed = False

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Answers in order; one that the server refused is a ResponseError in its place."""
        async with self._free:
            if self._idle:
                try:
                    return await self._talk(self._idle.pop(), commands)
                except Cut as error:
                    if _of_server(error):
                        raise
                    self._close_idle()  # left from before a restart, as the others are, probably
            return await self._talk(self._make(), commands)

    async def _talk(self, connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
        life, whole = self._life, False
        try:
            said = b"".join(map(packed, commands))
            await connection.send_packed_command([said], check_health=False)
            answers = [await _answer(connection) for _ in commands]
            whole = True
            return answers
        finally:
            if whole and life == self._life and not self._closed:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)

    def drop(self) -> None:
        """Whoever answers there now, no connection of before is used again."""
        self._life += 1
        self._close_idle()

    def close(self) -> None:
        """It is no node of ours any more: who still holds this pool leaves no connection in it."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop()._close()  # type: ignore[no-untyped-call]


def packed(command: Command) -> bytes:
    """A command as it goes over the wire; a fifth of the time that the library takes.

    ("GET", b"k", 7) -> *3 $3 GET $1 k $1 7, each line ended by CR LF
    """
    words = [word if type(word) is bytes else str(word).encode() for word in command]
    lines = [b""] * (2 * len(words) + 2)
    lines[0] = b"*%d" % len(words)
    try:
        lines[1:-1:2] = map(_HEADS.__getitem__, map(len, words))
    except IndexError:  # some are long
        lines[1:-1:2] = [b"$%d" % len(word) for word in words]
    lines[2:-1:2] = words
    return b"\r\n".join(lines)


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _of_server(error: Cut) -> bool:
    """Whether a server said it, rather than a connection that broke."""
    return getattr(error, "status_code", None) is not None


def maker(
    address: Address, host: str, port: int, connect_s: float, sentinel: bool = False
) -> Callable[[], AbstractConnection]:
    """Makes unconnected connections to one node of an address."""
    options = dict(address.options)
    login = [options.pop(f"sentinel_{name}", None) for name in ("username", "password")]
    given: dict[str, Any] = {
        "db": 0 if sentinel else address.database,
        "username": login[0] if sentinel else address.username,
        "password": login[1] if sentinel else address.password,
        "protocol": 2,  # enough, and spares the round trip of HELLO
        "driver_info": None,
        "socket_timeout": None,  # ours is around the whole call; theirs loses cancellations
        "socket_connect_timeout": connect_s,
        "retry": Retry(NoBackoff(), 0),
        **options,
    }
    if address.kind == "unix":
        return lambda: UnixDomainSocketConnection(path=address.path, **given)
    kind: Any = SSLConnection if address.tls else Connection
    return lambda: kind(host=host, port=port, **given)

"""HTTP load: keep-alive clients that do almost nothing, so that the server is what is measured.

Edge of bench/. The first answer of a connection is read in full; after that only its bytes are
counted, for the same request is answered in the same length. Open it to load another server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import psutil

WAIT_S = 10.0  # for the answers under way when a burst ends


class WrongAnswer(RuntimeError):
    """Not what this request is answered with; the round is worth nothing."""


class Client(asyncio.Protocol):
    """One connection that asks the same thing again and again."""

    def __init__(self, request: bytes, answered: Callable[[Client], bool]) -> None:
        self._request, self._answered = request, answered
        self.first = b""  # the whole first answer
        self.failed: str | None = None
        self._size = self._got = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is asked before `ask`."""
        self._transport = cast(asyncio.Transport, transport)

    def ask(self) -> None:
        """Once more."""
        self._got = 0
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts bytes; asks again as long as it is told to."""
        self._got += len(data)
        if not self._size:
            self.first += data
            try:
                self._size = answer_bytes(self.first)
            except WrongAnswer as wrong:
                self.failed = str(wrong)
        elif not data.startswith(b"HTTP/1.1 200") and self._got == len(data):
            self.failed = f"{data[:60]!r}"
        if self._got > self._size > 0:
            self.failed = f"{self._got} bytes where {self._size} were expected"
        if (self._got == self._size or self.failed) and self._answered(self):
            self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        """A server that closes has failed, unless we closed."""
        if not self._transport.is_closing() or error is not None:
            self.failed = f"the connection was lost: {error}"
            self._answered(self)

    def close(self) -> None:
        """For good."""
        self._transport.close()


def answer_bytes(data: bytes) -> int:
    """Length of the answer that begins here; 0 = its head is not complete."""
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end:
        return 0
    if not head.startswith(b"HTTP/1.1 200"):
        raise WrongAnswer(f"{data[:200]!r}")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(head) + 4 + int(line[15:])
    raise WrongAnswer(f"an answer without content-length: {head!r}")


@dataclass
class Load:
    """Some connections to one server, each with one request."""

    port: int
    requests: Sequence[bytes]  # one per connection
    clients: list[Client] = field(default_factory=list)
    _until: float = 0.0
    _count: int = 0
    _busy: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        """Connect and see every connection answered once."""
        loop = asyncio.get_running_loop()
        for request in self.requests:
            made = Client(request, self._answered)
            await loop.create_connection(lambda made=made: made, "127.0.0.1", self.port)  # type: ignore[misc]
            self.clients.append(made)
        await self.burst(0.0)

    async def burst(self, seconds: float) -> tuple[int, float]:
        """(answers, seconds they took); raises WrongAnswer."""
        began = time.perf_counter()
        self._until, self._count, self._busy = began + seconds, 0, len(self.clients)
        self._idle.clear()
        for client in self.clients:
            client.ask()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds + WAIT_S)
        except TimeoutError:
            raise WrongAnswer(f"{self._busy} connections without an answer") from None
        took = time.perf_counter() - began
        wrong = [client.failed for client in self.clients if client.failed]
        if wrong:
            raise WrongAnswer(f"{len(wrong)} of {len(self.clients)} connections: {wrong[0]}")
        return self._count, took

    def _answered(self, client: Client) -> bool:
        """Shall it ask again?"""
        self._count += 1
        if client.failed is None and time.perf_counter() < self._until:
            return True
        self._busy -= 1
        if self._busy <= 0:
            self._idle.set()
        return False

    def close(self) -> None:
        """End all connections."""
        for client in self.clients:
            client.close()


def cpu_s(pid: int) -> float:
    """Processor time that this process has used, in steps of some 10 ms."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """One HTTP/1.1 request, as it goes over the wire."""
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nhost: bench\r\n{length}\r\n".encode() + body

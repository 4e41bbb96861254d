"""Peer: a TCP server whose every connection follows a script; the far end of HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

LENGTH = re.compile(rb"content-length: *(\d+)", re.I)


class Aborted(Exception):
    """A connection carried an abort: its script need not go on."""


@dataclass
class Call:
    """One connection as a script sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: Peer

    async def request(self) -> bytes:
        """Head and body of the next request; b"" where the client closed instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            found = LENGTH.search(head)
            body = await self.reader.readexactly(int(found[1])) if found else b""
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        self.peer.requests.append(head + body)
        return head + body

    async def asked(self) -> bytes:
        """The next request that is no abort; an abort is answered, and its connection ends."""
        request = await self.request()
        if request.startswith(b"POST /abort_request "):
            self.peer.requests.remove(request)
            await self.send(answer(b"", more=b"connection: close\r\n"))
            raise Aborted
        return request

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    def reset(self) -> None:
        """Close so that the client sees RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def closed(self) -> None:
        """Until the client closes; whatever it still sends is thrown away."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.peer.seen_closed += 1


Script = Callable[[Call], Awaitable[None]]


@dataclass
class Peer:
    """What happened at the server."""

    port: int = 0
    tls: bool = False
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    seen_closed: int = 0  # closes noticed by Call.closed()

    @property
    def url(self) -> str:
        return f"http{'s' * self.tls}://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def peer(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """Serve `script` on a free port of loopback; every connection is closed when it returns."""
    state = Peer(tls=tls is not None)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.connections += 1
        state.open += 1
        try:
            await script(Call(reader, writer, state))
        except (asyncio.CancelledError, Aborted):
            pass  # the test is over, where streams would log it; or only this connection
        finally:
            state.open -= 1
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**24, ssl=tls)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes = b"{}", status: int = 200, more: bytes = b"") -> bytes:
    """A complete answer with a length; `more` = further header lines, each ending in CRLF."""
    head = b"HTTP/1.1 %d Any\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


def replies(*answers: bytes) -> Script:
    """Answer each connection's requests with these bytes in order, repeating the last."""

    async def script(call: Call) -> None:
        left = list(answers)
        while await call.request():
            await call.send(left.pop(0) if len(left) > 1 else left[0])

    return script

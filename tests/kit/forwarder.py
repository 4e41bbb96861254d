"""Forwarder: a stable TCP address in front of servers that come and go, as a service name is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class Forwarder:
    """New connections go to `target`; open ones stay where they are."""

    target: int  # port on loopback
    port: int = 0
    taken: list[int] = field(default_factory=list)  # the target of each connection, in order
    open: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # one of each connection

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        for task in list(self.tasks):
            task.cancel()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken.append(self.target)
        self.open += 1
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            self.open -= 1
            return
        ways = [
            asyncio.create_task(_copy(reader, there[1])),
            asyncio.create_task(_copy(there[0], writer)),
        ]
        try:
            await asyncio.wait(ways)
        except asyncio.CancelledError:
            pass  # the test is over; streams would log it
        finally:
            self.open -= 1
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            there[1].close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65_536):
            writer.write(part)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def forwarding(target: int) -> AsyncIterator[Forwarder]:
    """A forwarder on a free port of loopback until the block ends."""
    found = Forwarder(target)
    tasks = found.tasks

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await found.serve(reader, writer)
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

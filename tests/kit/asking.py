"""Asking: a client by hand, so that a test says when it reads, and when it leaves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request under way on a connection of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def head(self) -> int:
        """Wait for the head; the status."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        return self.status

    async def part(self) -> bytes:
        """The next chunk of a chunked body; b"" at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def body(self) -> bytes:
        """All of the rest, whatever its framing. Raises IncompleteReadError where it is cut."""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        parts = []
        while data := await self.part():
            parts.append(data)
        return b"".join(parts)

    def leave(self) -> None:
        """Close without a word."""
        self.writer.transport.abort()


async def asked(
    url: str, body: dict[str, Any] | bytes, path: str = "/generate", limit: int = 2**16
) -> Asked:
    """Send one request; nothing is read until the test says so. `limit`: bytes held unread."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    return Asked(reader, writer)


async def listened(url: str, path: str, headers: str = "") -> Asked:
    """GET a stream; `headers`: whole lines."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\n{headers}\r\n".encode())
    return Asked(reader, writer)

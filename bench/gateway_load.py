"""Gateway load: clients that ask one after the other, plain or as a stream, and time every answer.

Edge of bench/. A fixed number of answers over some keep-alive connections; whatever is no 200 ends
the round. Open it to load a gateway in another way.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

from bench.gateway_engine import MODEL
from bench.http_load import WrongAnswer, answer_bytes

MOST_S = 120.0  # for all answers of a round
WORDS = "the quick brown fox jumps over the lazy dog "


def chat(size: int, chunks: int = 0) -> bytes:
    """One request whose body has about `size` bytes; a stream of so many parts, or 0 = plain."""
    body = {"model": MODEL, "max_tokens": chunks or 16, "stream": chunks > 0, "messages": []}
    room = max(1, size - len(json.dumps(body)) - 40)
    text = (WORDS * (room // len(WORDS) + 1))[:room]
    data = json.dumps({**body, "messages": [{"role": "user", "content": text}]}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Round:
    """What is left to be asked, and how long each answer took."""

    request: bytes
    left: int
    open: int
    seconds: list[float] = field(default_factory=list)
    wrong: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, of: Round) -> None:
        self._of, self._held, self._began = of, bytearray(), 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks at once."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if self._of.left <= 0 or self._of.wrong:
            self._transport.close()
            return
        self._of.left -= 1
        self._held.clear()
        self._began = time.perf_counter()
        self._transport.write(self._of.request)

    def data_received(self, data: bytes) -> None:
        """Until the answer is whole."""
        self._held += data
        if not _whole(self._held):
            return
        if not self._held.startswith(b"HTTP/1.1 200"):
            self._of.wrong = f"{bytes(self._held[:200])!r}"
        self._of.seconds.append(time.perf_counter() - self._began)
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        """The last of them ends the round."""
        if error is not None or not self._transport.is_closing():
            self._of.wrong = self._of.wrong or f"the connection was lost: {error}"
        self._of.open -= 1
        if self._of.open <= 0:
            self._of.done.set()


def _whole(held: bytearray) -> bool:
    if b"chunked" in held[:400].lower():
        return held.endswith(b"0\r\n\r\n")
    if not held.startswith(b"HTTP/1.1 200"):
        return b"\r\n\r\n" in held
    size = answer_bytes(bytes(held[:1000]))
    return size > 0 and len(held) >= size


async def ask(port: int, request: bytes, count: int, together: int) -> list[float]:
    """Seconds of each of `count` answers. Raises WrongAnswer."""
    told = Round(request, count, together)
    loop = asyncio.get_running_loop()
    for _ in range(together):
        await loop.create_connection(lambda: Client(told), "127.0.0.1", port)
    try:
        await asyncio.wait_for(told.done.wait(), MOST_S)
    except TimeoutError:
        raise WrongAnswer(f"{told.left} of {count} were not answered in {MOST_S:g} s") from None
    if told.wrong or len(told.seconds) < count:
        raise WrongAnswer(told.wrong or f"{len(told.seconds)} answers of {count}")
    return told.seconds

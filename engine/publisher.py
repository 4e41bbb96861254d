"""Publisher: how does the world hear what a cache did?

Edge. One per dp rank, above cache.py; the form of a batch is events' business (its dialects).
Source of the frames: protocols of vLLM and SGLang, which share them. Open it to change transport.

    PUB      topic | sequence, 8 bytes big endian, from 0 in each life | payload
    ROUTER   asked  [empty, first sequence wanted]
             answer [empty, topic, sequence, payload] each, then [empty, empty, ff x 8, empty]
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from kvplane.events import DIALECTS, EngineEvent
from kvplane.runtime import Clock, cancel, supervise

from .errors import PortTaken
from .metrics import EngineMetrics

log = logging.getLogger(__name__)

TOPIC = b""
END = b"\xff" * 8
HIGH_WATER = 100_000  # messages kept per slow subscriber, then dropped, as vLLM does
TRIES = 64  # to find neighbouring free ports


class Publisher:
    """Events of one dp rank, with the last batches kept for who missed them."""

    def __init__(
        self, form: str, dp_rank: int, buffer: int, clock: Clock, metrics: EngineMetrics
    ) -> None:
        self._encode = DIALECTS[form].encode
        self._dp_rank = dp_rank
        self._clock = clock
        self._metrics = metrics
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._context: zmq.asyncio.Context | None = None
        self._serving: asyncio.Task[None] | None = None
        self.sequence = 0  # of the next batch
        self.port = self.replay_port = 0

    async def start(self, host: str, port: int, replay_port: int) -> None:
        """Bind both sockets; port 0 = a free one. Raises PortTaken."""
        self._context = context = zmq.asyncio.Context()
        try:
            self._live: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
            self._live.setsockopt(zmq.SNDHWM, HIGH_WATER)
            self.port = _bind(self._live, host, port, "--events-port")
            self._replay = context.socket(zmq.ROUTER)
            # a router drops silently at its mark: one whole buffer must fit twice
            self._replay.setsockopt(zmq.SNDHWM, 2 * (self._kept.maxlen or 1) + 2)
            self.replay_port = _bind(self._replay, host, replay_port, "--replay-port")
        except OSError:
            await self.stop()
            raise
        self._serving = asyncio.create_task(
            supervise(f"replay dp_rank={self._dp_rank}", self._serve, self._clock)
        )

    async def stop(self) -> None:
        """Close both sockets; what subscribers have not fetched is gone, as in a real engine."""
        await cancel(self._serving)
        context, self._context = self._context, None
        if context is not None:
            self._live.close(linger=0)
            context.destroy(linger=0)

    def publish(self, events: Sequence[EngineEvent]) -> None:
        """One batch; never blocks."""
        if not events or self._context is None:
            return
        payload = self._encode(self._clock.wall(), events, self._dp_rank)
        number = self.sequence.to_bytes(8, "big")
        self.sequence += 1
        self._kept.append((number, payload))
        with contextlib.suppress(zmq.Again):  # a publisher drops, it never waits
            self._live.send_multipart([TOPIC, number, payload], zmq.NOBLOCK)
        self._metrics.batches.inc()

    async def _serve(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                self._metrics.replays.labels("ignored").inc()
                log.warning("replay request ignored frames=%d", len(frames))
                continue
            who, first = frames[0], frames[2]  # big endian of one length: compares as bytes
            for number, payload in list(self._kept):
                if number >= first:
                    await self._replay.send_multipart([who, b"", TOPIC, number, payload])
            await self._replay.send_multipart([who, b"", b"", END, b""])
            self._metrics.replays.labels("served").inc()


def free_range(host: str, count: int) -> int:
    """The first of `count` neighbouring ports that are free right now. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(TRIES):
        with contextlib.ExitStack() as held:
            try:
                first = 0
                for number in range(count):
                    probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    probe.bind((host, first + number if first else 0))
                    first = first or int(probe.getsockname()[1])
                return first
            except (OSError, OverflowError):  # taken, or past the last port
                continue
    raise PortTaken(f"no {count} neighbouring free ports on {host}")


def _bind(endpoint: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int, flag: str) -> int:
    """Bind and say which port it became. Raises PortTaken, with the flag where it would help."""
    endpoint.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    place = f"[{host}]" if ":" in host else host
    address = f"tcp://{place}:{port or '*'}"
    try:
        endpoint.bind(address)
    except zmq.ZMQError as error:
        why = zmq.strerror(error.errno or 0)
        if error.errno == zmq.EADDRINUSE:
            why += f"; {flag} chooses another"
        raise PortTaken(f"events cannot be published at {address}: {why}") from error
    return int(endpoint.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

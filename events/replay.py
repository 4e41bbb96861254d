"""Replay: ask an engine's replay socket for the batches from a number on.

Edge: one question, one bounded answer; no judgement. Used by subscriber.py. Open it to change how
long or how much is waited for. A fresh DEALER each time: nothing of an earlier answer is left in
it, and it finds an engine that was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
import zmq.asyncio

from kvplane.runtime import Clock, backoff

from .errors import BadFrames
from .frames import Frame, question, replayed
from .metrics import EventsMetrics
from .settings import EventsSettings


@dataclass(frozen=True, slots=True)
class Answer:
    """Batches in the order they came. Not `ended` means that the end mark did not come."""

    frames: tuple[Frame, ...]
    ended: bool


class Replays:
    """The replay socket of one worker, if it has one, and whether an answer is still owed."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str | None,
        settings: EventsSettings,
        clock: Clock,
        metrics: EventsMetrics,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.owed = False  # it was silent when all from the first batch on was needed
        self._due = 0.0  # monotonic seconds when it is asked again
        self._context, self._settings = context, settings
        self._clock, self._metrics = clock, metrics
        self._turns = turns or asyncio.Semaphore()  # answers that are read at one time
        self._waits = self._patience()

    async def ask(self, first: int) -> Answer | None:
        """One question; None where nothing at all came back, or nobody is there to ask."""
        if self.endpoint is None:
            return None
        async with self._turns:
            answer = await ask(self._context, self.endpoint, first, self._settings)
        outcome = "answered" if answer.ended else "cut" if answer.frames else "silent"
        self._metrics.replays.labels(outcome).inc()
        return answer if answer.ended or answer.frames else None

    def owe(self, owed: bool = True) -> None:
        """All from the first batch on is still needed, or not any more."""
        self.owed = owed and self.endpoint is not None
        if self.owed:
            self._due = self._clock.now() + next(self._waits)
        else:
            self._waits = self._patience()

    def _patience(self) -> Iterator[float]:
        settings = self._settings
        return backoff(settings.replay_retry_s, most_s=settings.replay_retry_most_s)

    @property
    def due(self) -> bool:
        """An answer is owed, and it was not asked for lately."""
        return self.owed and self._clock.now() >= self._due


async def ask(
    context: zmq.asyncio.Context, endpoint: str, first: int, settings: EventsSettings
) -> Answer:
    """All that the engine still holds from `first` on, read as fast as it comes."""
    frames: list[Frame] = []
    ended = False
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)  # IPv4 goes on working
        socket.setsockopt(zmq.RCVHWM, settings.replay_batches)
        socket.setsockopt(zmq.MAXMSGSIZE, settings.message_bytes)
        socket.connect(endpoint)
        await socket.send_multipart(question(first))
        with contextlib.suppress(TimeoutError, BadFrames):
            async with asyncio.timeout(settings.replay_total_s):
                ended = await _read(socket, frames, settings)
    finally:
        socket.close(linger=0)
    return Answer(tuple(frames), ended)


async def _read(socket: zmq.asyncio.Socket, frames: list[Frame], settings: EventsSettings) -> bool:
    direct: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
    held = 0
    while len(frames) < settings.replay_batches and held < settings.replay_bytes:
        async with asyncio.timeout(settings.replay_s):
            message = await socket.recv_multipart()
        with contextlib.suppress(zmq.Again):
            for _ in range(settings.drain_batches):
                frame = replayed(message)
                if frame is None:
                    return True
                frames.append(frame)
                held += len(frame.payload)
                message = direct.recv_multipart(zmq.NOBLOCK)
            frame = replayed(message)  # the last one drained
            if frame is None:
                return True
            frames.append(frame)
    return False

"""Replay: ask an engine's replay socket for the batches from a number on.

Edge: one question, one bounded answer; no judgement. Used by subscriber.py. Open it to change how
long or how much is waited for. A fresh DEALER each time: nothing of an earlier answer is left in
it, and it finds an engine that was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import zmq
import zmq.asyncio

from .errors import BadFrames
from .frames import Frame, question, replayed
from .settings import EventsSettings


@dataclass(frozen=True, slots=True)
class Answer:
    """Batches in the order they came. Not `ended` means that the end mark did not come."""

    frames: tuple[Frame, ...]
    ended: bool


async def ask(
    context: zmq.asyncio.Context, endpoint: str, first: int, settings: EventsSettings
) -> Answer:
    """All that the engine still holds from `first` on, read as fast as it comes."""
    frames: list[Frame] = []
    ended = False
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
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

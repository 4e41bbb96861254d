"""Hearing: what decodes say first, bounded in time and, all of it together, in bytes.

Edge. Used by offer.py for each new connection; control.py reads. Open it to change what may be
arriving at one time. A bind may have megabytes and thousands of connections may be open, so
without a bound those who begin one and never end it would hold more memory than there is.

    nothing ... length ............ body        the length: whenever it comes, within `wait_s`
              the slowest is cut where all together are too much; the body: within `hello_s`
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .control import Channel
from .frames import MOST_BIND, Frame
from .settings import TransferSettings


class Hearing:
    """One per rank port."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._arriving: dict[Channel, int] = {}  # bytes to come of each, the slowest first
        self.held = 0  # bytes of all of them
        self.cut = 0  # how many had to make room

    async def frame(self, channel: Channel, wait_s: float) -> Frame:
        """The next frame. Raises TimeoutError, PeerGone, BadFrame."""
        async with asyncio.timeout(wait_s):
            length = await channel.length(MOST_BIND)
        with self._room_for(channel, length):
            async with asyncio.timeout(self._settings.hello_s):
                return await channel.body(length)

    @contextmanager
    def _room_for(self, channel: Channel, length: int) -> Iterator[None]:
        self._arriving[channel] = length
        self.held += length
        while self.held > self._settings.most_arriving_bytes and len(self._arriving) > 1:
            slowest = next(iter(self._arriving))
            self._over(slowest)
            slowest.reset()  # who reads it raises PeerGone
            self.cut += 1
        try:
            yield
        finally:
            self._over(channel)

    def _over(self, channel: Channel) -> None:
        self.held -= self._arriving.pop(channel, 0)

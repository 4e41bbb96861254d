"""Control: one connection that carries frames, with bounds and deadlines.

Edge. Used by offer.py and pull.py; frames.py says what travels. Foreign exceptions become ours
here. Open it to change how frames are read or how a connection ends.
"""

from __future__ import annotations

import asyncio

from kvplane.vocabulary import Stage

from .errors import PeerGone
from .frames import MOST_SMALL, BadFrame, Frame, decode_frame, encode_frame, frame_length


def address_text(host: str, port: int) -> str:
    """host:port, an IPv6 literal in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Channel:
    """Frames over one TCP connection. Reading and writing may happen in different tasks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        name = writer.get_extra_info("peername") or ("unknown", 0)
        self.host: str = name[0]
        self.peer = address_text(name[0], name[1])

    @staticmethod
    async def dial(host: str, port: int) -> Channel:
        """Raises PeerGone of stage connect; the caller brings the deadline."""
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=MOST_SMALL)
        except (OSError, UnicodeError) as error:  # the latter: no host can have such a name
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise PeerGone(address_text(host, port), why, Stage.CONNECT) from error
        return Channel(reader, writer)

    async def read(self, most: int = MOST_SMALL, stage: Stage = Stage.VERIFY) -> Frame:
        """The next frame. Raises PeerGone at the end of the stream, BadFrame for garbage."""
        return await self.body(await self.length(most, stage), stage)

    async def length(self, most: int = MOST_SMALL, stage: Stage = Stage.VERIFY) -> int:
        """Bytes of the frame that begins; body() is next. Raises as read() does."""
        return frame_length(await self._exactly(4, stage), most)

    async def body(self, length: int, stage: Stage = Stage.VERIFY) -> Frame:
        """The frame of that length. Raises as read() does."""
        return decode_frame(await self._exactly(length, stage))

    async def _exactly(self, size: int, stage: Stage) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise PeerGone(self.peer, "control connection closed", stage) from error

    def post(self, frame: Frame) -> None:
        """Write without waiting; a dead connection shows at the next read."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(frame))

    async def drain(self, stage: Stage = Stage.VERIFY) -> None:
        """Wait until the frames posted are on their way."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise PeerGone(self.peer, "control connection closed", stage) from error

    def reset(self) -> None:
        """Close at once; what is not sent yet is dropped."""
        self._writer.transport.abort()

    def finish(self, last: Frame | None = None) -> None:
        """A last frame, then close; never waits for a peer that does not read."""
        if last is not None:
            self.post(last)
        if self._writer.transport.get_write_buffer_size():
            self.reset()
        self.close()

    def close(self) -> None:
        """Idempotent; does not wait."""
        self._writer.close()


__all__ = ["BadFrame", "Channel", "address_text"]

"""A decode's last words may come when nobody asks any more; that is no error of anybody."""

from __future__ import annotations

import asyncio

import pytest

from kvplane.transfer.backends.base import Offer
from kvplane.transfer.errors import TransferError
from kvplane.transfer.frames import PROTOCOL, AbortFrame, BindFrame, Frame, VerdictFrame
from kvplane.transfer.meeting import Meeting
from kvplane.transfer.metadata import Layout

BIND = BindFrame(
    protocol=PROTOCOL, room=71, attempt=1, generation="g", layout=Layout("m", 16, "f", 1, 1, 1, 1),
    offer=Offer("tcp", 1, "127.0.0.1", 1, (1,), ("a",)), pages=(1,), tokens=16, aux_bytes=1000,
)  # fmt: skip


class Cable:
    """Of a channel what a meeting uses; frames are put in by hand."""

    peer = "decode"

    def __init__(self) -> None:
        self.came: asyncio.Queue[Frame] = asyncio.Queue()

    async def read(self) -> Frame:
        return await self.came.get()

    def post(self, frame: Frame) -> None:
        """Nobody looks."""

    async def drain(self) -> None:
        """Never full."""


@pytest.mark.parametrize(
    ("last", "lost"),
    [(VerdictFrame(ok=True), False), (VerdictFrame(ok=False), True), (AbortFrame(reason=""), True)],
)
async def test_a_verdict_that_nobody_waits_for_any_more_is_heard(last: Frame, lost: bool) -> None:
    cable, why = Cable(), list[TransferError]()
    meeting = Meeting(cable, BIND, why.append, True)  # type: ignore[arg-type]
    listening = asyncio.create_task(meeting.listen(5.0))
    asking = asyncio.create_task(meeting.commit(1))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    cable.came.put_nowait(last)
    await asyncio.wait_for(listening, 5)
    assert bool(why) is lost

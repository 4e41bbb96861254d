"""Verifying: from the prefill's commit to the decode's own conviction.

Edge, decode side. Used by pull.py; metadata.py holds the comparison. Open it to change what is
checked, or when the slot is read.
"""

from __future__ import annotations

from kvplane.vocabulary import Stage

from .backends.base import Landing
from .control import Channel
from .errors import (
    BadMetadata,
    ChecksumMismatch,
    GenerationMismatch,
    PrefillFailed,
    Refused,
    RoomMismatch,
    ShortData,
    TransferError,
)
from .frames import BadFrame, CommitFrame, FailedFrame
from .metadata import BadRecord, Expected, Metadata, Mismatch, decode_metadata, verify
from .regions import Regions
from .waiting import page_sums


async def verified(
    landing: Landing, expected: Expected, regions: Regions, checksums: bool, peer: str
) -> Metadata:
    """After the commit: read the slot once, compare everything. Raises TransferError."""
    try:
        got = decode_metadata(landing.take())
    except BadRecord as error:
        raise BadMetadata(str(error)) from error
    _demand(verify(expected, got, None), peer)
    if landing.landed not in (None, expected.pages):
        raise ShortData("pages", expected.pages, landing.landed or 0)
    if checksums:
        sums = await page_sums(regions, landing.ticket.pages)
        _demand(verify(expected, got, sums), peer)
    return got


async def committed(channel: Channel, expected: Expected) -> None:
    """Until the prefill says that all its writes are confirmed. Raises TransferError."""
    try:
        frame = await channel.read()
    except BadFrame as error:
        raise Refused(channel.peer, f"speaks something else: {error}", Stage.VERIFY) from error
    if isinstance(frame, FailedFrame):
        raise PrefillFailed(channel.peer, expected.room, frame.reason, clean=frame.clean)
    if not isinstance(frame, CommitFrame):
        said = f"{type(frame).__name__} instead of commit"
        raise Refused(channel.peer, said, Stage.VERIFY)


def _demand(verdict: object, peer: str) -> None:
    if isinstance(verdict, Mismatch):
        raise error_of(verdict, peer)


def error_of(mismatch: Mismatch, peer: str) -> TransferError:
    """One class per thing a caller can do something about."""
    what, expected, received = mismatch.what, mismatch.expected, mismatch.received
    if what == "checksum":
        return ChecksumMismatch(mismatch.positions)
    if what in ("generation", "attempt"):
        return GenerationMismatch(str(expected), str(received), f"{what} of {peer}")
    assert isinstance(expected, int) and isinstance(received, int)
    if what == "room":
        return RoomMismatch(expected, received)
    return ShortData(what, expected, received)

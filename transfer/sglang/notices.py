"""Notices: the short messages around a room, in both directions.

Pure. Status is the only one whose form depends on the backend; the rest is the same for all.
Open it when SGLang appends a frame to one of them. Source: SGLang 0.5.23.

    decode -> prefill   ABORT room [ip port [generation]]       BOOTSTRAP room ip port
    prefill -> decode   ABORT_ACK room [rank [generation]]      AUX_DATA room buffer row size bytes
                        room status rank                        Mooncake, Ascend
                        KV_STATUS room status rank reason       NIXL
                        MoriMsgGuard room status rank reason    Mori
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import mori
from .fields import (
    PORT,
    RANK,
    REASON,
    ROOM,
    U32_BIG,
    BadFrame,
    blob,
    number,
    shown,
    text,
)
from .form import Form

STAGING = (b"CHUNK_READY", b"STAGING_REQ", b"STAGING_RSP", b"WATERMARK")


@dataclass(frozen=True, slots=True)
class Status:
    """How far one prefill rank is with a room."""

    room: int
    status: int  # states.Poll
    rank: int  # states.rank_number of the sender
    reason: str | None = None  # the Mooncake form cannot say one


@dataclass(frozen=True, slots=True)
class Abort:
    """The decode gives up; with an address it wants an ABORT_ACK there."""

    room: int
    host: str | None = None
    port: int | None = None
    generation: str | None = None  # of the attempt; given back as it came

    @property
    def frames(self) -> int:
        """How many say this."""
        return 2 if self.host is None else 4 if self.generation is None else 5


@dataclass(frozen=True, slots=True)
class AbortAck:
    """No write of this room is under way at this prefill rank any more."""

    room: int
    rank: int | None = None
    generation: str | None = None

    @property
    def frames(self) -> int:
        """How many say this."""
        return 2 if self.rank is None else 3 if self.generation is None else 4


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The decode is there but has no pages yet (policy prefill_complete); answered by status 2."""

    room: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class AuxData:
    """One metadata buffer's row, where it does not go by RDMA."""

    room: int
    buffer: int
    row: int
    length: int
    data: bytes


_NUMBERS = (("room", ROOM), ("status", number(0, 4)), ("rank", RANK))
ABORT = Form(
    Abort,
    (b"ABORT",),
    (("room", ROOM), ("host", text()), ("port", PORT), ("generation", text())),
    2,
)
ABORT_ACK = Form(
    AbortAck, (b"ABORT_ACK",), (("room", ROOM), ("rank", RANK), ("generation", text())), 2
)
BARE_STATUS = Form(Status, (), _NUMBERS, 3)
NIXL_STATUS = Form(Status, (b"KV_STATUS",), (*_NUMBERS, ("reason", REASON)), 4)
MORI_STATUS = Form(Status, (mori.GUARD,), (*_NUMBERS, ("reason", REASON)), 4)
BOOTSTRAP = Form(Bootstrap, (b"BOOTSTRAP",), (("room", ROOM), ("host", text()), ("port", PORT)), 4)
AUX_DATA = Form(
    AuxData,
    (b"AUX_DATA",),
    (("room", ROOM), ("buffer", RANK), ("row", RANK), ("length", U32_BIG), ("data", blob())),
    6,
)


def abort(frames: Sequence[bytes]) -> Abort:
    """As ABORT.read, and an address is whole. Raises BadFrame."""
    if len(frames) == 3:
        raise BadFrame(3, "port", shown(None), PORT.right)
    return ABORT.read(frames)


def aux_data(frames: Sequence[bytes]) -> AuxData:
    """As AUX_DATA.read, and the length is that of the bytes. Raises BadFrame."""
    found = AUX_DATA.read(frames)
    if found.length != len(found.data):
        raise BadFrame(4, "length", str(found.length), f"{len(found.data)}, the bytes of frame 5")
    return found

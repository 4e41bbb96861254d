"""Mori: what a decode tells a prefill rank of SGLang in the form for AMD GPUs.

Pure. Every message begins with a guard. Addresses travel as descriptors that only Mori's library
can read: they are kept as bytes. No frames of Mori were recorded (it needs AMD GPUs): metadata is
as noted of 0.5.23, register as read in SGLang's public source. Open it when that changes.

    register  guard None ip port engine kv aux state gpu tp rank item | state-items state-dims
    metadata  guard room ip port engine pages aux state dst_info_num | prefix
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .fields import (
    BYTES,
    PAGES,
    PORT,
    RANK,
    ROOM,
    SIZE,
    TOKENS,
    BadFrame,
    blob,
    lists,
    maybe,
    msgpacked,
    shown,
    text,
)
from .form import Form

GUARD = b"MoriMsgGuard"
Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MoriRegister:
    """Where the memory of one decode rank lies; once per pair of ranks."""

    host: str
    port: int
    engine: bytes  # Mori's description of the peer's engine; its key is inside
    kv: tuple[bytes, ...]  # Mori's descriptions of memory, one per region
    aux: tuple[bytes, ...]
    state: tuple[tuple[bytes, ...], ...]  # by component of the state
    gpu: int
    tp: int  # attention tensor parallel size of the decode
    rank: int  # its engine rank
    item_bytes: int  # one page of the first region
    state_items: Lists = ()
    state_dims: Lists = ()
    frames: int = 14


@dataclass(frozen=True, slots=True)
class MoriMetadata:
    """Where the pages of one room go."""

    room: int
    host: str
    port: int
    engine: str  # key of the decode's engine; names the peer
    pages: tuple[int, ...]
    aux: int | None  # row for the metadata
    state: Lists = ()
    receivers: int = 1  # how many decode ranks the prefill waits for (dst_info_num)
    prefix_tokens: int | None = None  # held by the decode already; None = none, or not said
    frames: int = 10

    @property
    def dummy(self) -> bool:
        """Takes part, gets nothing; a full prefix hit has no pages but still wants its row."""
        return not self.pages and self.aux is None and not self.prefix_tokens


REGISTER = Form(
    MoriRegister,
    front=(GUARD, b"None"),
    fields=(
        ("host", text()),
        ("port", PORT),
        ("engine", blob()),
        ("kv", msgpacked(tuple[bytes, ...])),
        ("aux", msgpacked(tuple[bytes, ...])),
        ("state", msgpacked(tuple[tuple[bytes, ...], ...])),
        ("gpu", RANK),
        ("tp", SIZE),
        ("rank", RANK),
        ("item_bytes", BYTES),
        ("state_items", lists("I")),
        ("state_dims", lists("I")),
    ),
    least=12,
)
METADATA = Form(
    MoriMetadata,
    front=(GUARD,),
    fields=(
        ("room", ROOM),
        ("host", text()),
        ("port", PORT),
        ("engine", text()),
        ("pages", PAGES),
        ("aux", maybe(RANK)),
        ("state", lists("i")),
        ("receivers", SIZE),
        ("prefix_tokens", maybe(TOKENS)),
    ),
    least=7,
)


def metadata(frames: Sequence[bytes]) -> MoriMetadata:
    """As METADATA.read, and pages have a row to go with them. Raises BadFrame."""
    found = METADATA.read(frames)
    if found.pages and found.aux is None:
        raise BadFrame(6, "aux", shown(frames[6]), f"{RANK.right} where frame 5 has pages")
    return found

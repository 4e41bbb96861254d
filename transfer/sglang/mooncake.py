"""Mooncake: what a decode tells a prefill rank of SGLang in the Mooncake form; so does Ascend.

Pure. No guard: the first frame is `None` (register) or the room (metadata). A register of ten
frames is the oldest that receivers take; later releases appended the rest.
Open it when a release of SGLang appends or redefines a frame. Source: 0.5.23, recorded.

    register  None ip port session kv aux state rank tp item | state layers staging dcp items
    metadata  room ip port session pages aux state dst_info_num | prefix device-pages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .fields import (
    ADDRESS,
    BYTES,
    PAGES,
    PORT,
    RANK,
    ROOM,
    SIZE,
    TOKENS,
    BadFrame,
    lenient,
    lists,
    maybe,
    or_empty,
    packed,
    shown,
    text,
)
from .form import Form

Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MooncakeRegister:
    """Where the memory of one decode rank lies; once per pair of ranks."""

    host: str
    port: int
    session: str  # host:port of the transfer engine; names the peer
    kv: tuple[int, ...]  # addresses, one per region
    aux: tuple[int, ...]
    state: Lists  # addresses by component of the state
    rank: int  # engine rank of the decode
    tp: int  # its attention tensor parallel size
    item_bytes: int  # one page of the first region; 0 = no region
    state_items: Lists = ()
    state_dims: Lists = ()
    layers: tuple[int, ...] = ()
    state_layers: Lists = ()
    staging_base: int = 0
    staging_bytes: int = 0
    dcp: int = 1
    dcp_rank: int = 0
    staging_layers: tuple[int, ...] = ()
    items: tuple[int, ...] = ()  # bytes of one page, region by region
    frames: int = 20


@dataclass(frozen=True, slots=True)
class MooncakeMetadata:
    """Where the pages of one room go."""

    room: int
    host: str
    port: int
    session: str
    pages: tuple[int, ...]
    aux: int | None  # row for the metadata; None only for a dummy
    state: Lists
    receivers: int  # how many decode ranks the prefill waits for (dst_info_num)
    prefix_tokens: int | None = None  # held by the decode already; None = not said
    device_pages: tuple[int, ...] | None = None
    frames: int = 10

    @property
    def dummy(self) -> bool:
        """Takes part, gets nothing."""
        return not self.pages and self.aux is None


REGISTER = Form(
    MooncakeRegister,
    front=(b"None",),
    fields=(
        ("host", text()),
        ("port", PORT),
        ("session", text()),
        ("kv", packed("Q")),
        ("aux", packed("Q")),
        ("state", lists("Q")),
        ("rank", RANK),
        ("tp", SIZE),
        ("item_bytes", BYTES),
        ("state_items", lists("I")),
        ("state_dims", lists("I")),
        ("layers", packed("I")),
        ("state_layers", lists("I")),
        ("staging_base", ADDRESS),
        ("staging_bytes", or_empty(BYTES, 0)),
        ("dcp", lenient(SIZE, 1)),
        ("dcp_rank", lenient(RANK, 0)),
        ("staging_layers", packed("Q")),
        ("items", packed("Q")),
    ),
    least=10,
)
METADATA = Form(
    MooncakeMetadata,
    front=(),
    fields=(
        ("room", ROOM),
        ("host", text()),
        ("port", PORT),
        ("session", text()),
        ("pages", PAGES),
        ("aux", maybe(RANK)),
        ("state", lists("i")),
        ("receivers", SIZE),
        ("prefix_tokens", maybe(TOKENS)),
        ("device_pages", maybe(packed("i"))),
    ),
    least=8,
)


def metadata(frames: Sequence[bytes]) -> MooncakeMetadata:
    """As METADATA.read, and pages have a row to go with them. Raises BadFrame."""
    found = METADATA.read(frames)
    if found.pages and found.aux is None:
        right = f"{RANK.right} where frame 4 has pages"
        raise BadFrame(5, "aux", shown(frames[5]), right)
    return found

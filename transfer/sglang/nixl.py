"""NIXL: what a decode tells a prefill rank of SGLang in the NIXL form.

Pure. Every message begins with a guard; without it the receive thread of SGLang's prefill dies.
Other order than Mooncake's: metadata has the number of receivers before the state.
Open it when a release of SGLang appends or redefines a frame. Source: 0.5.23, recorded.

    register  guard None ip port agent blob kv aux state gpu tp rank item | state staging slots ...
    metadata  guard room ip port agent pages aux dst_info_num | state prefix dummy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .fields import (
    ADDRESS,
    BYTES,
    FLAG,
    PAGES,
    PORT,
    RANK,
    ROOM,
    SIZE,
    TOKENS,
    blob,
    lenient,
    lists,
    maybe,
    names,
    or_empty,
    packed,
    text,
)
from .form import Form

GUARD = b"NixlMsgGuard"
Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class NixlRegister:
    """Where the memory of one decode rank lies; once per pair of ranks."""

    host: str
    port: int
    agent: str  # its name in NIXL; names the peer
    blob: bytes  # the agent's own metadata
    kv: tuple[int, ...]  # addresses, one per region
    aux: tuple[int, ...]
    state: Lists  # addresses by component of the state
    gpu: int
    tp: int  # attention tensor parallel size of the decode
    rank: int  # its engine rank
    item_bytes: int  # one page of the first region; 0 = no region
    state_items: Lists = ()
    state_dims: Lists = ()
    staging_base: int = 0
    staging_bytes: int = 0
    slots: int = 0  # pages of one region
    kinds: tuple[str, ...] = ()  # of memory, region by region
    items: tuple[int, ...] = ()  # bytes of one page, region by region
    state_layers: Lists = ()
    layers: tuple[int, ...] = ()
    dcp: int = 1
    dcp_rank: int = 0
    state_bytes: Lists = ()
    frames: int = 25


@dataclass(frozen=True, slots=True)
class NixlMetadata:
    """Where the pages of one room go."""

    room: int
    host: str
    port: int
    agent: str
    pages: tuple[int, ...]
    aux: int  # row for the metadata
    receivers: int  # how many decode ranks the prefill waits for (dst_info_num)
    state: Lists = ()
    prefix_tokens: int | None = None  # held by the decode already; None = not said
    dummy: bool = False  # takes part, gets nothing
    frames: int = 11


REGISTER = Form(
    NixlRegister,
    front=(GUARD, b"None"),
    fields=(
        ("host", text()),
        ("port", PORT),
        ("agent", text()),
        ("blob", blob()),
        ("kv", packed("Q")),
        ("aux", packed("Q")),
        ("state", lists("Q")),
        ("gpu", RANK),
        ("tp", SIZE),
        ("rank", RANK),
        ("item_bytes", BYTES),
        ("state_items", lists("I")),
        ("state_dims", lists("I")),
        ("staging_base", ADDRESS),
        ("staging_bytes", or_empty(BYTES, 0)),
        ("slots", lenient(BYTES, 0)),
        ("kinds", names(("VRAM", "DRAM"))),
        ("items", packed("Q")),
        ("state_layers", lists("I")),
        ("layers", packed("I")),
        ("dcp", lenient(SIZE, 1)),
        ("dcp_rank", lenient(RANK, 0)),
        ("state_bytes", lists("Q")),
    ),
    least=13,
)
METADATA = Form(
    NixlMetadata,
    front=(GUARD,),
    fields=(
        ("room", ROOM),
        ("host", text()),
        ("port", PORT),
        ("agent", text()),
        ("pages", PAGES),
        ("aux", RANK),
        ("receivers", SIZE),
        ("state", lists("i")),
        ("prefix_tokens", maybe(TOKENS)),
        ("dummy", FLAG),
    ),
    least=8,
)


def metadata(frames: Sequence[bytes]) -> NixlMetadata:
    """As METADATA.read; before the last frame existed, no pages meant a dummy. Raises BadFrame."""
    found = METADATA.read(frames)
    return found if found.frames == METADATA.full else replace(found, dummy=not found.pages)

"""tcp_frames: what stands in front of the bytes on a data connection.

Pure, for the `tcp` backend. The receiver reads the head, then the body, checks both against the
ticket it gave out, answers GO, and only then reads payload. Open it to change the wire form.

    head, little endian, 64 bytes
    0        4     6      8      16        24           32      36        40     48      56
    | "KVT1" | ver | kind | room | session | generation | pages | regions | body | total | sum |
                    generation: xxh3 of the decode's; body: bytes after the head; sum: xxh3
    body of pages    | page numbers, u32 x pages | item bytes, u32 x regions | xxh3-64 of both |
    body of record   (empty; total = bytes of the record)
    payload          region 0: its items of all pages in order, region 1: ...; or the record

    answer           | status u8 | 0 | length u16 | text utf-8 |      GO, APPLIED, REFUSED

    prefill: head body          payload
    decode:             GO              APPLIED      REFUSED instead of either; then it closes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from kvplane.vocabulary import Stage

from ..errors import GenerationMismatch, Refused, RoomMismatch, TransferError
from .base import Ticket

MAGIC = b"KVT1"
VERSION = 1
MOST_TEXT = 512  # bytes of a refusal
_HEAD = struct.Struct("<4sHHQQQIIQQ")
_SUM = struct.Struct("<Q")
ANSWER = struct.Struct("<BBH")
HEAD_BYTES = _HEAD.size + _SUM.size


class BadHead(ValueError):
    """Not a head of this protocol."""


class Kind(IntEnum):
    """What the payload is."""

    PAGES = 1
    RECORD = 2


class Status(IntEnum):
    """What the receiver says."""

    GO = 1  # the head and body fit, send the payload
    APPLIED = 2  # the last byte is in place
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Head:
    """The fixed part."""

    kind: Kind
    room: int
    session: int
    generation: int  # digest of the decode's generation
    pages: int
    regions: int
    body_bytes: int
    total_bytes: int  # of payload

    def encode(self) -> bytes:
        """64 bytes."""
        data = _HEAD.pack(
            MAGIC, VERSION, self.kind, self.room, self.session, self.generation, self.pages,
            self.regions, self.body_bytes, self.total_bytes,
        )  # fmt: skip
        return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def digest(generation: str) -> int:
    """A generation as it stands in a head."""
    return int(xxhash.xxh3_64_intdigest(generation.encode()))


def decode_head(data: bytes) -> Head:
    """Exactly HEAD_BYTES; raises BadHead, never anything else."""
    if len(data) != HEAD_BYTES:
        raise BadHead(f"{len(data)} bytes, a head has {HEAD_BYTES}")
    magic, version, kind, *rest = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadHead("no head")
    if version != VERSION:
        raise BadHead(f"version {version}, this is {VERSION}")
    if _SUM.unpack_from(data, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEAD.size]):
        raise BadHead("the head's own checksum does not fit")
    if kind not in (Kind.PAGES, Kind.RECORD):
        raise BadHead(f"kind {kind}")
    return Head(Kind(kind), *rest)


def encode_pages(pages: tuple[int, ...], items: tuple[int, ...]) -> bytes:
    """The body of a pages write."""
    data = struct.pack(f"<{len(pages)}I{len(items)}I", *pages, *items)
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def body_bytes(pages: int, regions: int) -> int:
    """Size of that body."""
    return 4 * (pages + regions) + _SUM.size


def decode_pages(head: Head, body: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Page numbers and item sizes; raises BadHead where the body is torn."""
    if len(body) != body_bytes(head.pages, head.regions):
        raise BadHead(f"body of {len(body)} bytes does not fit {head.pages} pages")
    end = len(body) - _SUM.size
    if _SUM.unpack_from(body, end)[0] != xxhash.xxh3_64_intdigest(body[:end]):
        raise BadHead("the body's own checksum does not fit")
    numbers = struct.unpack_from(f"<{head.pages + head.regions}I", body)
    return numbers[: head.pages], numbers[head.pages :]


def head_fault(head: Head, ticket: Ticket, items: tuple[int, ...]) -> TransferError | None:
    """What in the head is against the ticket, before anything else is read; None = fine."""
    if head.room != ticket.room:
        return RoomMismatch(ticket.room, head.room)
    if head.generation != digest(ticket.generation):
        return GenerationMismatch(ticket.generation, f"#{head.generation:016x}", "data for decode")
    text = _record_fault(head, ticket) if head.kind is Kind.RECORD else None
    if head.kind is Kind.PAGES:
        text = _pages_head_fault(head, len(ticket.pages), items)
    return Refused(ticket.peer, f"data head: {text}", Stage.VERIFY) if text else None


def _record_fault(head: Head, ticket: Ticket) -> str | None:
    if head.body_bytes or head.pages or head.regions:
        return "a record has no pages"
    if not 1 <= head.total_bytes <= ticket.aux_bytes:
        return f"record of {head.total_bytes} bytes, the slot has {ticket.aux_bytes}"
    return None


def _pages_head_fault(head: Head, most: int, items: tuple[int, ...]) -> str | None:
    if not 1 <= head.pages <= most or head.regions != len(items):
        return f"{head.pages} pages of {head.regions} regions, at most {most} of {len(items)}"
    if head.body_bytes != body_bytes(head.pages, head.regions):
        return "body size does not fit"
    if head.total_bytes != head.pages * sum(items):
        return f"{head.total_bytes} bytes for {head.pages} pages of {sum(items)}"
    return None


def pages_fault(
    pages: tuple[int, ...], sizes: tuple[int, ...], wanted: set[int], items: tuple[int, ...]
) -> str | None:
    """What in the body is against the ticket; `wanted` = pages of the ticket not landed yet."""
    if sizes != items:
        return f"item bytes {sizes}, registered are {items}"
    if len(set(pages)) != len(pages):
        return "a page stands twice in the list"
    foreign = [page for page in pages if page not in wanted]
    if foreign:
        return f"page {foreign[0]} is not expected, or was written before"
    return None


def answer(status: Status, text: str = "") -> bytes:
    """What the receiver says."""
    data = text.encode()[:MOST_TEXT]
    return ANSWER.pack(status, 0, len(data)) + data

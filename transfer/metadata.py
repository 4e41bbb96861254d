"""Metadata: what both sides must agree on before a single byte is consumed.

Pure. Layout is compared when two engines meet (frames.py carries it); Metadata is the record that
the prefill writes after its pages are confirmed and the decode reads once. Open it to change
what is agreed on, or the record's form.

    record, little endian; the slot is filled with 0xff before it is offered, so it never matches
    0        4      6       8     16       24     28      32           36            40     44
    | "KVM1" | ver  | glen  | room | attempt | pages | tokens | first_token | cached | sums |
    | generation, glen bytes utf-8 | sums x u64, one xxh3-64 per page | xxh3-64 of all before |
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import xxhash

from kvplane.vocabulary import MAX_ROOM, Generation, Room

MAGIC = b"KVM1"
SCHEMA = 1
POISON = 0xFF  # fills an aux slot: as a room it would be 2**64-1, which is never minted
NO_TOKEN = -1
NO_GENERATION = Generation("")
MOST_GENERATION_BYTES = 256
_HEAD = struct.Struct("<4sHHQQIIiII")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one engine stores KV, all its ranks together. Equal on both sides, or nothing is sent."""

    model: str
    page_tokens: int
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_bytes: int  # of one page in one layer
    order: str = "kv,head,page,token,dim"
    revision: int = 1  # of how values are computed before they are stored
    speculative: str = ""  # method of draft tokens whose KV lies in the same pages; "" = none

    def differences(self, other: Layout, tolerated: Collection[str] = ()) -> tuple[str, ...]:
        """Every field that differs, with both values; empty = alike. `self` is 'here'."""
        return tuple(
            f"{f.name} {getattr(self, f.name)} here, {getattr(other, f.name)} there"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name) and f.name not in tolerated
        )


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the prefill says it delivered. room, generation, attempt, pages, sums: by Offers."""

    room: Room
    generation: Generation = NO_GENERATION  # of the prefill
    pages: int = 0  # pages sent, without those the decode held already
    tokens: int = 0  # prompt tokens whose KV is complete after this room
    first_token: int = NO_TOKEN  # the token that follows the prompt
    cached_tokens: int = 0  # of the prompt, from the prefill's own prefix cache
    page_sums: tuple[int, ...] = ()  # xxh3-64 per page sent; empty = checksums off
    attempt: int = 0  # of the decode's bind: names one session, never reused
    prompt: str = ""  # prompt_sum() of all tokens; the bind's must agree, the record has it not

    def encode(self) -> bytes:
        """The record as drawn above."""
        name = self.generation.encode()
        head = _HEAD.pack(
            MAGIC, SCHEMA, len(name), self.room, self.attempt, self.pages, self.tokens,
            self.first_token, self.cached_tokens, len(self.page_sums),
        )  # fmt: skip
        body = head + name + struct.pack(f"<{len(self.page_sums)}Q", *self.page_sums)
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def prompt_sum(ids: Sequence[int]) -> str:
    """Names the tokens whose KV is meant: page sums only say that bytes arrived as they left."""
    return xxhash.xxh3_128_hexdigest(struct.pack(f"<{len(ids)}I", *ids))


class BadRecord(ValueError):
    """These bytes are no metadata record; says what is wrong first."""


def record_bytes(pages: int) -> int:
    """Size of a slot that fits the record of a room of so many pages."""
    return _HEAD.size + MOST_GENERATION_BYTES + 8 * pages + _SUM.size


def decode_metadata(data: bytes | bytearray | memoryview) -> Metadata:
    """Read a slot; what follows the record is ignored. Raises BadRecord, never anything else."""
    data = bytes(data)
    if len(data) < _HEAD.size + _SUM.size:
        raise BadRecord(f"{len(data)} bytes, at least {_HEAD.size + _SUM.size} expected")
    if data[:4] == bytes([POISON]) * 4:
        raise BadRecord("never written")
    magic, schema, glen, room, attempt, pages, tokens, first, cached, sums = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadRecord(f"starts with {magic!r}, expected {MAGIC!r}")
    if schema != SCHEMA:
        raise BadRecord(f"schema version {schema}, expected {SCHEMA}")
    end = _HEAD.size + glen + 8 * sums
    if glen > MOST_GENERATION_BYTES or end + _SUM.size > len(data):
        raise BadRecord(f"truncated: {len(data)} bytes, {end + _SUM.size} expected")
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise BadRecord("its own checksum does not fit")
    if not 1 <= room <= MAX_ROOM:
        raise BadRecord(f"room {room} is not in 1 to 2**63-1")
    try:
        name = Generation(data[_HEAD.size : _HEAD.size + glen].decode())
    except UnicodeDecodeError as error:
        raise BadRecord("generation is not utf-8") from error
    page_sums = struct.unpack_from(f"<{sums}Q", data, _HEAD.size + glen)
    return Metadata(Room(room), name, pages, tokens, first, cached, page_sums, attempt)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the decode asked for."""

    room: Room
    generation: Generation  # of the prefill, as it said when the room was bound
    attempt: int
    pages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """Every fact fits."""

    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first fact that does not fit. what: room generation attempt pages tokens checksum."""

    what: str
    expected: object
    received: object
    positions: tuple[int, ...] = ()  # of pages with a wrong checksum


def verify(expected: Expected, got: Metadata, sums: Sequence[int] | None) -> Agreed | Mismatch:
    """Compare; `sums` are of the decode's own memory, None = checksums are off.

    Room first: a foreign record says nothing about ours.
    """
    for what in ("room", "generation", "attempt", "pages", "tokens"):
        want, have = getattr(expected, what), getattr(got, what)
        if want != have:
            return Mismatch(what, want, have)
    if sums is None:
        return Agreed(got)
    if len(got.page_sums) != len(sums):
        return Mismatch("checksum", len(sums), len(got.page_sums), tuple(range(len(sums))))
    pairs = enumerate(zip(sums, got.page_sums, strict=True))
    wrong = tuple(at for at, (here, there) in pairs if here != there)
    return Mismatch("checksum", 0, len(wrong), wrong) if wrong else Agreed(got)

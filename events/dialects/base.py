"""Base: what must every engine's event format be turned into?

Seam: the nouns past the decoder and what a dialect offers; pure. Sits between events/subscriber.py,
which has bytes, and events/translation.py, which knows no engine. Open it when the nouns lack a
fact that some engine tells.

    payload bytes --decode--> Decoded(events: BlocksStored | BlocksRemoved | AllCleared)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvplane.vocabulary import Tier

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class BadBatch(ValueError):
    """A payload that is no batch of events at all; its events are lost."""


class BlocksStored(msgspec.Struct, frozen=True):  # made in a tenth of a dataclass's time
    """An engine holds these blocks now; hashes are engine keys (see `engine_key`)."""

    hashes: tuple[bytes, ...]
    parent: bytes | None  # the block before the first; None at the root of a prompt
    tokens: Sequence[int]  # of the whole range; empty in placeholders of lower tiers
    block_size: int  # tokens a block; 0 in placeholders
    tier: Tier = Tier.GPU
    adapter: str = ""  # LoRA name
    salt: str = ""
    extra: tuple[tuple[str, ...], ...] = ()  # per hash: image@3, hex of a digest; empty = none
    group: int = 0  # KV cache group of a hybrid model; 0 also where none is told
    kind: str = ""  # attention kind of the group; "" = the engine does not tell
    paired: bool = False  # tokens were pairs: a block also needs the token after it
    adapter_id: int | None = None  # engine-local number, where no name is told
    grouped: bool = False  # the engine told the group's number
    window: int = 0  # tokens of a sliding window or a chunk; 0 = not told
    lookahead: int = 0  # tokens after each block that it needs as well (`paired` is another 1)

    @property
    def dense(self) -> bool:
        """Every block of the range is named, so positions may be counted."""
        return 0 < len(self.tokens) == len(self.hashes) * self.block_size

    @property
    def full_attention(self) -> bool:
        """A group whose blocks 0..n-1 are all needed: the only kind that is indexed."""
        return self.kind in FULL_ATTENTION or (self.kind == "" and self.group == 0)


class BlocksRemoved(msgspec.Struct, frozen=True):
    """An engine gave up one copy of each of these blocks in one tier."""

    hashes: tuple[bytes, ...]
    tier: Tier = Tier.GPU
    group: int = 0
    grouped: bool = False  # the engine told the group's number


class AllCleared(msgspec.Struct, frozen=True):
    """An engine dropped its cache. In doubt about lower tiers we drop them too."""


EngineEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class Dropped:
    """One event that was left out. `kind` is a closed set: the three names, or "unknown"."""

    kind: str
    reason: str
    unread: bool = False  # not even its kind can be read

    @property
    def took_away(self) -> bool:
        """Blocks may be gone that we still believe in: what is known is worth less from here."""
        return self.unread or self.kind in ("BlockRemoved", "AllBlocksCleared")


class Decoded(msgspec.Struct, frozen=True):
    """One batch of an engine.

    `unknown` names what was read past, each name once in the life of a Reader, so that it can be
    logged and counted without a flood: BlockStored.colour  BlockStored.field16  medium:tape
    """

    ts: float  # engine clock, seconds; 0.0 where it is missing or not finite
    events: tuple[EngineEvent, ...]
    dp_rank: int | None
    dropped: tuple[Dropped, ...] = ()
    unknown: tuple[str, ...] = ()
    joined: int = 0  # removals that became part of the noun before them
    void: int = 0  # events that came before a drop which may have taken away what they stored


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's way to say it. `decode` raises BadBatch and nothing else."""

    name: str
    decode: Callable[[bytes], Decoded]
    encode: Callable[[float, Sequence[EngineEvent], int], bytes]
    copies: bool  # each physical copy of a block is told; else a block is there or not


def engine_key(value: int | bytes) -> bytes:
    """An engine's hash as opaque bytes; ints and bytes never meet, nor do the signs.

    Raises ValueError for an int beyond 64 bit.

        11 -> b"u" + 8 bytes    -5 -> b"s" + 8 bytes    b"..32" -> b"b..32"
    """
    try:
        if type(value) is int and value >= 0:
            return b"u" + value.to_bytes(8)
        if isinstance(value, bytes):
            return b"b" + value
        return b"s" + value.to_bytes(8, "big", signed=True)
    except OverflowError:
        raise ValueError(f"block hash {value!r}: must fit into 64 bits") from None


def engine_keys(values: Sequence[int | bytes]) -> tuple[bytes, ...]:
    """The keys of many; numbers of one sign at once, in a third of the time."""
    try:
        packed = struct.pack(f">{len(values)}Q", *values)
    except struct.error:  # digests, or negative numbers
        return tuple([engine_key(value) for value in values])
    return tuple(map(b"u".__add__, struct.unpack("8s" * len(values), packed)))


def engine_hash(key: bytes) -> int | bytes:
    """The reverse of `engine_key`; raises ValueError for anything else."""
    if key[:1] == b"b":
        return key[1:]
    if key[:1] not in (b"u", b"s") or len(key) != 9:
        raise ValueError(f"engine key {key!r}: must be made by engine_key")
    return int.from_bytes(key[1:], "big", signed=key[:1] == b"s")


MEDIA = {  # names of engines and of what stores blocks beside them, in small letters
    "gpu": Tier.GPU,
    "cpu": Tier.CPU,
    "cpu_pinned": Tier.CPU,
    "host": Tier.CPU,
    "dram": Tier.CPU,
    "localcpubackend": Tier.CPU,  # the last words are LMCache's
    "disk": Tier.DISK,
    "storage": Tier.DISK,
    "ssd": Tier.DISK,
    "nvme": Tier.DISK,
    "localdiskbackend": Tier.DISK,
    "gdsbackend": Tier.DISK,
    "remote": Tier.REMOTE,
    "external": Tier.REMOTE,
    "remotebackend": Tier.REMOTE,
    "p2pbackend": Tier.REMOTE,
}
_PLAIN: dict[str | None, Tier] = {None: Tier.GPU}
_PLAIN.update(MEDIA)
_PLAIN.update({name.upper(): tier for name, tier in MEDIA.items()})  # as most engines write them
_BEGIN_CPU = ("cpu", "host")  # cpu_tier2, host_numa1: the same memory under a longer name


def known_medium(name: str) -> bool:
    """Is the name in the table, or one of its longer forms?"""
    small = name.lower()
    return small in MEDIA or small.startswith(_BEGIN_CPU)


def tier_of(medium: str | None, locality: str | None = None) -> Tier:
    """Where a block lies, by the table; compared without case, and told from afar is remote.

    What is not known is taken for remote: the tier that promises least.
    """
    found = _PLAIN.get(medium)  # nearly always
    if found is None:
        name = (medium or "gpu").lower()
        found = MEDIA.get(name) or (Tier.CPU if name.startswith(_BEGIN_CPU) else Tier.REMOTE)
    if locality is None:
        return found
    far = isinstance(locality, str) and locality.upper() == "REMOTE"
    return Tier.REMOTE if far and found is not Tier.GPU else found

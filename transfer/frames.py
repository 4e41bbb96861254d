"""Frames: what decode and prefill say to each other on the control connection.

Pure. The decode dials the prefill's rank port; control.py moves the frames, offer.py and pull.py
act on them. Open it to change a message; positions are never used, unknown members are ignored.

    | length u32 big endian | msgpack map, its type under "t" |      length 1 .. most

    decode                         prefill
    hold  ------------------------>          I will come for this room: keep it (again and again)
    bind  ------------------------>          room, attempt, layout, offer, pages, regions
          <------------------------ bound    offers agree; says the prefill's generation
                (pages, record on the data path)
          <------------------------ commit   every byte is confirmed, the record too
    verdict ---------------------->          ok, or why not; end
    abort ------------------------>          any time: the decode gives up
          <------------------------ refused  instead of bound; names every differing field
          <------------------------ failed   any time: the prefill gives up
"""

from __future__ import annotations

import struct

import msgspec

from kvplane.vocabulary import MAX_ROOM

from .backends.base import Offer
from .metadata import MOST_GENERATION_BYTES, Layout

PROTOCOL = 2
MOST_SMALL = 64 * 1024  # bytes of every frame but bind
MOST_BIND = 4 * 1024 * 1024  # 262 144 page numbers of up to 5 bytes, and the rest
MOST_SHARDS = 1024  # decode ranks that one prefill rank serves in one room
MOST_PROMPT = 64  # characters of a sum of tokens
MOST_REASON = 2000  # characters of a reason that travels
_LENGTH = struct.Struct(">I")


class BadFrame(ValueError):
    """Not a frame of this protocol."""


class OtherProtocol(BadFrame):
    """A frame of another version; who sent it is told so."""


class _Frame(msgspec.Struct, tag_field="t", frozen=True, kw_only=True):
    """Base: the tag stands under "t"."""


class BindFrame(_Frame, tag="bind", frozen=True, kw_only=True):
    """The decode wants a room."""

    protocol: int
    room: int
    attempt: int  # random; names the data session too
    generation: str  # of the decode
    layout: Layout
    offer: Offer
    pages: tuple[int, ...]  # the decode's page numbers, in prompt order
    tokens: int
    aux_bytes: int
    held_pages: int = 0  # leading pages the decode has already
    sums: bool = True  # the decode will check page sums
    expected: str | None = None  # generation of the prefill, where the decode knows it
    regions: tuple[str, ...] = ()  # the part of each page this prefill rank is to send; () = all
    shard: int = 0  # which of the decode ranks that this prefill rank serves in this room
    shards: int = 1  # how many those are
    sources: int = 1  # prefill ranks that this decode rank hears before it speaks
    grant: bytes = b""  # of the landing, for the backend
    prompt: str = ""  # prompt_sum() of the decode's tokens; "" = it does not say

    @property
    def other_bytes(self) -> int:
        """About what is held for it while its room is bound, beside the page numbers."""
        offer = self.offer
        texts = (*offer.names, *self.regions)
        blobs = len(offer.blob) + len(self.grant) + 8 * len(offer.items)
        return blobs + sum(64 + len(text) for text in texts)


class HoldFrame(_Frame, tag="hold", frozen=True, kw_only=True):
    """The decode has this room in its queue and will bind; the prefill keeps the KV meanwhile."""

    protocol: int
    room: int


class BoundFrame(_Frame, tag="bound", frozen=True, kw_only=True):
    """The prefill knows the room and agrees on the form of the data."""

    generation: str


class RefusedFrame(_Frame, tag="refused", frozen=True, kw_only=True):
    """No; the connection closes. kind: refused, layout, generation, prefill-failed, lease."""

    kind: str
    reason: str
    fields: tuple[str, ...] = ()


class FailedFrame(_Frame, tag="failed", frozen=True, kw_only=True):
    """The room will never be delivered; the connection closes."""

    reason: str
    clean: bool = False  # every write that was begun is confirmed: no late byte can come


class CommitFrame(_Frame, tag="commit", frozen=True, kw_only=True):
    """Pages and record are applied at the decode."""

    pages: int


class VerdictFrame(_Frame, tag="verdict", frozen=True, kw_only=True):
    """What the decode's verify said; kind as in errors.py."""

    ok: bool
    kind: str = ""
    reason: str = ""


class AbortFrame(_Frame, tag="abort", frozen=True, kw_only=True):
    """The decode gives up; nothing may be sent any more."""

    reason: str


Frame = (
    BindFrame
    | HoldFrame
    | BoundFrame
    | RefusedFrame
    | FailedFrame
    | CommitFrame
    | VerdictFrame
    | AbortFrame
)


class _Envelope(msgspec.Struct):
    """All that is read of a frame of another version."""

    protocol: int = PROTOCOL


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_envelope = msgspec.msgpack.Decoder(_Envelope)


def encode_frame(frame: Frame) -> bytes:
    """Length and body."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes, most: int) -> int:
    """From the first four bytes; raises BadFrame where it is 0 or above `most`."""
    (length,) = _LENGTH.unpack(head)
    if not 1 <= length <= most:
        raise BadFrame(f"frame of {length} bytes, allowed are 1 to {most}")
    return int(length)


def decode_frame(body: bytes) -> Frame:
    """One message; raises BadFrame, never anything else. The version is looked at first."""
    errors = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    try:
        spoken = _envelope.decode(body).protocol
        if spoken != PROTOCOL:
            raise OtherProtocol(f"protocol version {spoken}, this is {PROTOCOL}")
        return _decoder.decode(body)
    except errors as error:
        raise BadFrame(f"no frame: {error}") from error


def bind_faults(bind: BindFrame, most_pages: int) -> str | None:
    """The first member of a bind that no decode can mean; None = fine."""
    if not 1 <= bind.room <= MAX_ROOM:
        return f"room {bind.room}: must be 1 to 2**63-1"
    if not 1 <= bind.attempt <= MAX_ROOM:
        return f"attempt {bind.attempt}: must be 1 to 2**63-1"
    if len(bind.pages) > most_pages:
        return f"pages: {len(bind.pages)}, at most {most_pages}"
    if len(set(bind.pages)) != len(bind.pages) or any(not 0 <= page < 2**32 for page in bind.pages):
        return "pages: must be different numbers of 32 bit"
    if bind.tokens < 0 or bind.held_pages < 0:
        return f"tokens {bind.tokens}, held_pages {bind.held_pages}: must be 0 or more"
    if not 0 <= bind.shard < bind.shards <= MOST_SHARDS:
        return (
            f"shard {bind.shard} of {bind.shards}: must be 0 to shards - 1, at most {MOST_SHARDS}"
        )
    if len(set(bind.regions)) != len(bind.regions):
        return "regions: must be different names"
    if len(bind.generation.encode()) > MOST_GENERATION_BYTES:
        return f"generation: must be at most {MOST_GENERATION_BYTES} bytes"
    if len(bind.prompt) > MOST_PROMPT:
        return f"prompt: must be a sum of at most {MOST_PROMPT} characters"
    if bind.sources < 1:
        return f"sources {bind.sources}: must be 1 or more"
    return None

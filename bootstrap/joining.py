"""Joining: what the nodes of one instance say to each other on the init address.

Pure. link.py moves the frames, rendezvous.py acts on them. Open it to change a message; unknown
members are ignored.

    | length u32 big endian | msgpack map, its type under "t" |      length 1 .. most

    node k dials                   node 0 listens
          <------------------------ challenge   protocol, nonce
    hello ------------------------>             who it is, which life, its facts, its proof
          <------------------------ welcome     life and facts of node 0, where to register
          <------------------------ refused     instead: why; `final` where dialling again is idle
    beat  <----------------------->             now and then, both ways
          <------------------------ ask         id, bytes
    answer, failed --------------->             id, bytes or why not
          <------------------------ cancel      id: nobody waits for the answer any more

With a secret both sides prove that they know it, over both nonces; it never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

from .errors import BootstrapError

PROTOCOL = "kvplane-rendezvous-1"
NONCE_BYTES = 32
MOST_HELLO = 64 * 1024  # bytes of a frame before a node has joined
MOST_FACTS, MOST_TEXT = 64, 256  # facts, and characters of a text
_LENGTH = struct.Struct(">I")


class BadFrame(BootstrapError):
    """Not a frame of this protocol; the link is of no further use."""


class _Message(msgspec.Struct, tag_field="t", frozen=True, kw_only=True):
    """Base: the tag stands under "t"."""


class Challenge(_Message, tag="challenge", frozen=True, kw_only=True):
    """The first thing that is said."""

    protocol: str
    nonce: bytes


class Hello(_Message, tag="hello", frozen=True, kw_only=True):
    """A node introduces itself."""

    protocol: str
    node_rank: int
    nnodes: int
    generation: str
    nonce: bytes
    facts: dict[str, str] = {}
    proof: bytes = b""


class Welcome(_Message, tag="welcome", frozen=True, kw_only=True):
    """It has joined."""

    generation: str
    bootstrap_host: str  # "": the host under which node 0 was dialled
    bootstrap_port: int
    facts: dict[str, str] = {}
    proof: bytes = b""


class Refusal(_Message, tag="refused", frozen=True, kw_only=True):
    """It has not, or no longer."""

    reason: str
    final: bool


class Beat(_Message, tag="beat", frozen=True, kw_only=True):
    """Somebody is there."""


class Ask(_Message, tag="ask", frozen=True, kw_only=True):
    """Work for a node."""

    id: int
    body: bytes


class Answer(_Message, tag="answer", frozen=True, kw_only=True):
    """Its result."""

    id: int
    body: bytes


class Failed(_Message, tag="failed", frozen=True, kw_only=True):
    """Or why there is none."""

    id: int
    reason: str


class Cancel(_Message, tag="cancel", frozen=True, kw_only=True):
    """The result is of no use any more."""

    id: int


Message = Challenge | Hello | Welcome | Refusal | Beat | Ask | Answer | Failed | Cancel
Told = TypeVar("Told", Hello, Welcome)
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """A message as it travels."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Messages out of a stream that comes in pieces; `most` bytes are one frame at most."""

    def __init__(self, most: int = MOST_HELLO) -> None:
        self.most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """What is complete now. Raises BadFrame; nothing may be fed after that."""
        self._buffer += data
        found: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if not 1 <= length <= self.most:
                raise BadFrame(f"frame of {length} bytes: must be 1 to {self.most}")
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            found.append(_message(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return found


def _message(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadFrame(f"no message: {error}"[:200]) from error


def facts_text(facts: dict[str, str]) -> str | None:
    """What is wrong with facts that are to travel; None where nothing is."""
    if len(facts) > MOST_FACTS:
        return f"facts: {len(facts)}, must be at most {MOST_FACTS}"
    long = next((k for k, v in facts.items() if len(k) > MOST_TEXT or len(v) > MOST_TEXT), None)
    return (
        None if long is None else f"fact {long[:MOST_TEXT]}: must be at most {MOST_TEXT} characters"
    )


def signed(secret: str, side: str, ours: bytes, theirs: bytes, told: Told) -> Told:
    """`told` with the proof that `side` (node or leader) knows the secret and says just this.

    `ours` is the nonce of node 0, `theirs` that of the node. Without a secret there is no proof.
    """
    return msgspec.structs.replace(told, proof=_proof(secret, side, ours, theirs, told))


def is_signed(secret: str, side: str, ours: bytes, theirs: bytes, told: Hello | Welcome) -> bool:
    """Whether the proof is right; compared in a time that tells nothing."""
    if not secret:
        return True
    wanted = _proof(secret, side, ours, theirs, told)
    return len(theirs) == NONCE_BYTES and hmac.compare_digest(told.proof, wanted)


def _proof(secret: str, side: str, ours: bytes, theirs: bytes, told: Hello | Welcome) -> bytes:
    if not secret:
        return b""
    said = _encoder.encode([side, ours, theirs, msgspec.structs.replace(told, proof=b"")])
    return hmac.digest(secret.encode(), said, hashlib.sha256)

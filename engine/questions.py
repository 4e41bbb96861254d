"""Questions: what node 0 of a prefill asks the nodes that follow it, and what they answer.

Pure. Bodies of the rendezvous link (bootstrap/), which brings them over, one answer a question;
leading.py asks, following.py answers. Open it to change a message; unknown members are ignored.

    ranks   which of yours can decodes find?    told when it is another answer than `known`
    room    compute this prompt, deliver        told when your ranks' decodes agreed, or did not
            leaving early: the room has failed elsewhere
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")
TOLD_S = 10.0  # an answer about ranks comes by then, also where nothing changed


class BadQuestion(ValueError):
    """Not a message of these."""


class _Message(msgspec.Struct, tag_field="t", frozen=True, kw_only=True):
    """Base: the tag stands under "t"."""


class Ranks(_Message, tag="ranks", frozen=True, kw_only=True):
    """The answer about ranks, and what node 0 knows when it asks."""

    there: tuple[tuple[int, int, int], ...] = ()  # dp, pp, tp of those that are registered
    why: str = ""  # what keeps the others out


class RanksAsked(_Message, tag="ranks-asked", frozen=True, kw_only=True):
    """Also says what a rank's registration must tell."""

    http_port: int  # of node 0
    known: Ranks = Ranks()


class RoomAsked(_Message, tag="room-asked", frozen=True, kw_only=True):
    """A room."""

    room: int
    dp: int
    ids: tuple[int, ...]
    salt: str
    cached_tokens: int  # as node 0 found it: all ranks tell the decode the same


class RoomTold(_Message, tag="room", frozen=True, kw_only=True):
    """How it ended; `stage` and `reason` where it failed."""

    first_token: int = -1
    stage: str = ""
    reason: str = ""


Question = RanksAsked | RoomAsked
_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ranks = msgspec.msgpack.Decoder(Ranks)
_rooms = msgspec.msgpack.Decoder(RoomTold)


def encode(message: Question | Ranks | RoomTold) -> bytes:
    """A body."""
    return _encoder.encode(message)


def question(body: bytes) -> Question:
    """Raises BadQuestion, never anything else."""
    return _decoded(_questions, body)


def ranks(body: bytes) -> Ranks:
    """Raises BadQuestion."""
    return _decoded(_ranks, body)


def room_told(body: bytes) -> RoomTold:
    """Raises BadQuestion."""
    return _decoded(_rooms, body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQuestion(f"no message of this protocol: {error}"[:200]) from error

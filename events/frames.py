"""Frames: what does a ZMQ message carry?

Pure: bytes in, nouns out. Sits below live.py and replay.py. Open it when an engine frames its
batches in another way. Source: protocols of vLLM (0.9 to 0.33) and SGLang (0.5.8 to 0.5.23).

    live      [topic, sequence (8 bytes, big endian), payload]
    question  ["", first sequence wanted]
    answer    ["", sequence, payload]  or  ["", topic, sequence, payload]     take the last two
    end       sequence ff ff ff ff ff ff ff ff and an empty payload
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from .errors import BadFrames
from .topics import shown

MAX_SEQUENCE = 2**53 - 1  # what the store counts up to
END = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One engine batch, not decoded."""

    sequence: int
    payload: bytes
    topic: str = field(default="", compare=False)  # for people; old replay answers have none

    @property
    def digest(self) -> int:
        """64 bits that tell this batch from one of another life with the same number."""
        return int(xxh3_64_intdigest(self.payload))


def live(frames: Sequence[bytes]) -> Frame:
    """A message of the PUB socket; raises BadFrames."""
    if len(frames) != 3:
        raise BadFrames(f"{_sizes(frames)}: must be topic, sequence, payload")
    return Frame(_sequence(frames[1]), frames[2], shown(frames[0]))


def replayed(frames: Sequence[bytes]) -> Frame | None:
    """A message of the replay socket, None for the end mark; raises BadFrames."""
    if not 2 <= len(frames) <= 4:
        raise BadFrames(f"{_sizes(frames)}: must be 3 or 4 in a replay answer")
    number, payload = frames[-2:]
    if number == END and not payload:
        return None
    topic = frames[1] if len(frames) == 4 else b""
    return Frame(_sequence(number), payload, shown(topic))


def question(first: int) -> list[bytes]:
    """What a DEALER sends to have all batches from `first` on."""
    return [b"", first.to_bytes(8, "big")]


def _sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise BadFrames(f"sequence of {len(frame)} bytes: must be 8")
    sequence = int.from_bytes(frame, "big")
    if sequence > MAX_SEQUENCE:
        raise BadFrames(f"sequence {sequence}: must be at most {MAX_SEQUENCE}")
    return sequence


def _sizes(frames: Sequence[bytes]) -> str:
    """What came, as a sample for people: how many frames, and how long the first ones are."""
    if not frames:
        return "0 frames"
    some = ", ".join(str(len(frame)) for frame in frames[:6])
    return f"{len(frames)} frames of {some} bytes"

"""Fields: how one frame of a multipart message is read and written.

Pure. Used by the forms beside it. Every kind of frame says what would be right, so that a refusal
can name frame number, field, value and rule. Open it to change a bound or an encoding.

    number   ASCII decimal                   b"45678"
    packed   little-endian numbers in a row  Q 8 bytes unsigned, I 4 unsigned, i 4 signed
    lists    u32 count, count x u32 bytes, then the packed lists; no list at all = empty frame
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
MOST_FRAMES = 64  # of one message; 25 are known
MOST_TEXT = 1024  # bytes of an address, session or agent name
MOST_REASON = 65_536  # bytes of a reason
MOST_NUMBERS = 1 << 20  # of one frame: pages of one room, pointers of one rank
MOST_LISTS = 4096  # in one frame: state components of one rank
MOST_BLOB = 16 << 20  # bytes of what only the transfer library can read, and of metadata rows
_SHOWN = 24  # bytes of a bad frame in its sentence


@dataclass(eq=False)
class BadFrame(ValueError):
    """This message is none of the form expected; nothing of it may be used."""

    frame: int  # counted from 0, guards included
    field: str
    value: str
    right: str

    def __str__(self) -> str:
        return f"frame {self.frame} ({self.field}): {self.value}, must be {self.right}"


class StagingFrame(BadFrame):
    """Known by name, not spoken here: a peer uses staging buffers, which are off by default."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of frame. `read` raises ValueError where the frame is not `right`."""

    right: str
    read: Callable[[bytes], T]
    write: Callable[[T], bytes]


def shown(frame: bytes | None) -> str:
    """A frame in a sentence, short whatever came."""
    if frame is None:
        return "missing"
    more = "..." if len(frame) > _SHOWN else ""
    return f"{bytes(frame[:_SHOWN])!r}{more} ({len(frame)} bytes)"


def number(least: int, most: int) -> Kind[int]:
    """ASCII decimal, digits only."""

    def read(frame: bytes) -> int:
        if not (1 <= len(frame) <= 20 and frame.isdigit()):
            raise ValueError
        return _within(int(frame), least, most)

    return Kind(f"a decimal number {least} to {most}", read, lambda value: b"%d" % value)


def _within(value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError
    return value


def or_empty(kind: Kind[T], empty: T) -> Kind[T]:
    """An empty frame stands for `empty`, and is written for it."""
    return Kind(
        f"{kind.right}, or empty",
        lambda frame: kind.read(frame) if frame else empty,
        lambda value: b"" if value == empty else kind.write(value),
    )


def lenient(kind: Kind[T], empty: T) -> Kind[T]:
    """An empty frame stands for `empty`, but is never written."""
    right = f"{kind.right}, or empty"
    return Kind(right, lambda frame: kind.read(frame) if frame else empty, kind.write)


def maybe(kind: Kind[T]) -> Kind[T | None]:
    """An empty frame is None."""
    return Kind(
        f"{kind.right}, or empty",
        lambda frame: kind.read(frame) if frame else None,
        lambda value: b"" if value is None else kind.write(value),
    )


def text(most: int = MOST_TEXT) -> Kind[str]:
    """Printable ASCII without blanks: an address, a session, a name."""

    def read(frame: bytes) -> str:
        if not 1 <= len(frame) <= most or not all(33 <= byte <= 126 for byte in frame):
            raise ValueError
        return frame.decode("ascii")

    return Kind(f"1 to {most} printable ASCII characters", read, lambda value: value.encode())


def _address(frame: bytes) -> int:
    if len(frame) != 8:
        raise ValueError
    return int.from_bytes(frame, "little")


def _u32(frame: bytes) -> int:
    if len(frame) != 4:
        raise ValueError
    return int.from_bytes(frame, "big")


def _reason(frame: bytes) -> str | None:
    if len(frame) > MOST_REASON:
        raise ValueError
    return frame.decode() or None  # UnicodeDecodeError is a ValueError


def blob(most: int = MOST_BLOB) -> Kind[bytes]:
    """Bytes that only the transfer library can read."""

    def read(frame: bytes) -> bytes:
        if len(frame) > most:
            raise ValueError
        return bytes(frame)

    return Kind(f"at most {most} bytes", read, bytes)


def packed(code: str, least: int | None = None) -> Kind[tuple[int, ...]]:
    """Numbers in a row: code Q, I or i as of struct."""
    width = struct.calcsize(f"<{code}")

    def read(frame: bytes) -> tuple[int, ...]:
        if len(frame) % width or len(frame) > MOST_NUMBERS * width:
            raise ValueError
        found = struct.unpack(f"<{len(frame) // width}{code}", frame)
        if least is not None and found and min(found) < least:
            raise ValueError
        return found

    what = {"Q": "unsigned", "I": "unsigned", "i": "signed"}[code]
    right = f"{what} numbers of {width} bytes, at most {MOST_NUMBERS}"
    right += "" if least is None else f", each {least} or more"
    return Kind(right, read, lambda value: struct.pack(f"<{len(value)}{code}", *value))


def lists(code: str) -> Kind[tuple[tuple[int, ...], ...]]:
    """Lists of numbers; none at all is an empty frame."""
    inner = packed(code)

    def read(frame: bytes) -> tuple[tuple[int, ...], ...]:
        return tuple(inner.read(part) for part in _parts(frame))

    def write(value: tuple[tuple[int, ...], ...]) -> bytes:
        if not value:
            return b""
        parts = [inner.write(one) for one in value]
        head = struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts))
        return head + b"".join(parts)

    return Kind(f"a count, as many byte lengths, and lists of {inner.right}", read, write)


def _parts(frame: bytes) -> list[bytes]:
    """The byte strings of a `lists` frame; raises ValueError where lengths and bytes disagree."""
    if not frame:
        return []
    if len(frame) < 4:
        raise ValueError
    count = _within(int.from_bytes(frame[:4], "little"), 0, MOST_LISTS)
    at = 4 + 4 * count
    if len(frame) < at:
        raise ValueError
    sizes = struct.unpack(f"<{count}I", frame[4:at])
    if at + sum(sizes) != len(frame):
        raise ValueError
    found = []
    for size in sizes:
        found.append(frame[at : at + size])
        at += size
    return found


def names(allowed: tuple[str, ...]) -> Kind[tuple[str, ...]]:
    """Words of a closed set, with commas between them."""

    def read(frame: bytes) -> tuple[str, ...]:
        words = tuple(frame.decode("ascii").split(",")) if frame else ()
        if len(words) > MOST_LISTS or not set(words) <= set(allowed):
            raise ValueError
        return words

    return Kind(f"{' or '.join(allowed)}, comma between", read, lambda v: ",".join(v).encode())


def msgpacked(shape: Any) -> Kind[Any]:
    """A msgpack value of this type; nothing in it is an empty frame."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(shape)

    def read(frame: bytes) -> Any:
        if len(frame) > MOST_BLOB:
            raise ValueError
        try:
            return decoder.decode(frame) if frame else ()
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError from error

    return Kind("msgpack lists of bytes", read, lambda v: msgspec.msgpack.encode(v) if v else b"")


PORT = number(1, 65_535)
ROOM = number(0, 2**63 - 1)  # 0 is said by warm-ups; no real transfer with it ever passes
RANK = number(0, 2**31 - 1)
SIZE = number(1, 2**31 - 1)
BYTES = number(0, 2**63 - 1)
TOKENS = number(0, 2**63 - 1)
PAGES = packed("i", least=0)
ADDRESS = or_empty(Kind("8 bytes", _address, lambda value: value.to_bytes(8, "little")), 0)
U32_BIG = Kind("4 bytes, big-endian", _u32, lambda value: value.to_bytes(4, "big"))
FLAG: Kind[bool] = Kind("0 or 1", lambda f: bool((b"0", b"1").index(f)), lambda v: b"%d" % v)
REASON: Kind[str | None] = Kind(
    f"UTF-8 text of at most {MOST_REASON} bytes", _reason, lambda value: (value or "").encode()
)

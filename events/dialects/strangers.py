"""Strangers: which members of events does nobody here know?

Pure. An engine's format grows: at the end of arrays, by new keys in maps. What is new is read past,
and told once, so that somebody can be warned without a flood. Used by reading.py. Open it to change
what that costs.

    cheap: the number of members is in an event's first bytes, so a shape (kind, number) that was
    looked through before is passed by; every 256th map is looked through again all the same
"""

from __future__ import annotations

from typing import Any

import msgspec

from .base import known_medium

_MOST = 256  # names and shapes kept; a sender who makes up more is not told again
_MOST_CHARS = 60
_AGAIN = 256
_ANY = msgspec.msgpack.Decoder()


class Strangers:
    """What one reader met and did not know. Names: BlockStored.colour, .field16, medium:tape."""

    def __init__(self) -> None:
        self._shapes: set[tuple[type, int]] = set()
        self._plain: set[tuple[type, int, str | None]] = set()  # first byte, medium: all known
        self.media: set[str | None] = {None}  # looked at before, whole and short
        self._media: set[str] = set()
        self._told: set[str] = set()
        self._left = _AGAIN

    def look(self, frame: Any, raw: msgspec.Raw) -> tuple[str, ...]:
        """Names that are new in this event; almost always none."""
        medium = getattr(frame, "medium", None)
        plain = type(frame), memoryview(raw)[0], medium
        self._left -= 1
        if plain in self._plain and self._left > 0:
            return ()
        short = len(medium or "") <= _MOST_CHARS
        if short and len(self.media) < _MOST:
            self.media.add(medium)
        if short and plain[1] <= 0x9F and len(self._plain) < _MOST:  # the number is in the byte
            self._plain.add(plain)
        return self._look(frame, raw, (medium or "gpu")[:_MOST_CHARS])

    def _look(self, frame: Any, raw: msgspec.Raw, medium: str) -> tuple[str, ...]:
        strange = medium not in self._media and self._strange(medium)
        shape = type(frame), members(raw)
        if shape in self._shapes and self._left > 0 and not strange:
            return ()
        found = [f"medium:{medium}"] if strange else []
        if self._left <= 0 or shape not in self._shapes:
            self._left = _AGAIN
            found += _unknown(type(frame), raw)
            if len(self._shapes) < _MOST:
                self._shapes.add(shape)
        fresh = [name for name in dict.fromkeys(found) if name not in self._told]
        fresh = fresh[: _MOST - len(self._told)]
        self._told.update(fresh)
        return tuple(fresh)

    def _strange(self, name: str) -> bool:
        """Is this a name that the table lacks? Asked once for each."""
        if len(self._media) < _MOST:
            self._media.add(name)
        return not known_medium(name)


def members(raw: msgspec.Raw) -> int:
    """How many members an event has, from its first bytes; tag and keys count as msgpack does."""
    head = memoryview(raw)
    first = head[0]
    if 0x80 <= first <= 0x9F:  # small map, small array
        return first & 0x0F
    wide = 4 if first in (0xDD, 0xDF) else 2
    return int.from_bytes(head[1 : 1 + wide], "big")


def _unknown(kind: type[msgspec.Struct], raw: msgspec.Raw) -> list[str]:
    """Members of one event that its struct lacks, which was decoded without them."""
    config, fields = kind.__struct_config__, kind.__struct_fields__
    tag = NAMES.get(str(config.tag), str(config.tag))
    if config.array_like:
        last = min(members(raw) - 1, len(fields) + 16)
        return [f"{tag}.field{number}" for number in range(len(fields) + 1, last + 1)]
    try:
        names = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one)
                 for one in _ANY.decode(raw)]  # fmt: skip
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return [f"{tag}.unreadable"]  # it is in what was passed by
    strange = [name for name in names if name not in (*fields, config.tag_field)]
    return [f"{tag}.{name[:_MOST_CHARS]}" for name in strange[:16]]


NAMES = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}

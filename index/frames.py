"""Frames: a body that says again what the one before it said, but for its long list.

Edge: remembers one body; between desk.py and question.py. Who asks for prompt after prompt says all
the rest of the body the same, byte for byte: so that is compared, not read, and the list is read
where it lies. A list that is read at once has neither brackets nor quotes that are not its own, so
what is around it means what it meant. Anything else is question.py's. Open it to change what counts
as the same.

    {"model": "m", "token_ids": [    17, 4, ..., 9    ], "workers": ["a"]}
    -------- the same ----------    another list     ----- the same -----
"""

from __future__ import annotations

import msgspec

from . import question
from .numerals import Memory, numerals
from .question import Question, few, framed
from .spans import hexes


class Frame(msgspec.Struct, frozen=True, gc=False):
    """What was around a list, and all that was asked but for it."""

    before: bytes
    after: bytes
    tokens: bool  # or hashes
    asked: Question


class Frames:
    """Of the questions of one desk. Safe to use from several threads."""

    def __init__(self, most_hashes: int, memory: Memory | None = None) -> None:
        self._most, self._memory = most_hashes, memory
        self._last: Frame | None = None

    def read(self, data: bytes) -> Question:
        """As question.read()."""
        frame = self._last
        if frame is not None and data.startswith(frame.before) and data.endswith(frame.after):
            first, last, one = len(frame.before), len(data) - len(frame.after), frame.asked
            tokens = hashes = None
            if len(data) not in question.AT_ONCE_BYTES:
                pass
            elif frame.tokens:
                tokens = numerals(data, first, last, self._memory)
            elif (hashes := hexes(data[first:last])) is not None:
                few(len(hashes), self._most)
            if tokens is not None or hashes is not None:
                return Question(
                    one.model, one.adapter, one.salt, one.workers, tokens, hashes, None, one.items
                )
        asked, span = framed(data, self._most, self._memory)
        if span is not None:
            bare = msgspec.structs.replace(asked, tokens=None, hashes=None)
            first, last = span
            self._last = Frame(data[:first], data[last:], asked.tokens is not None, bare)
        return asked

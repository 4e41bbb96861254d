"""onesided_slots: the little registered memory besides the pages.

Pure. Aux slots of landings, and what a sender stages: the record it writes, bytes that lie nowhere
registered. One piece of host memory per session, first fit. Open it to change how slots are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvplane.vocabulary import Stage

from ..errors import Refused
from ..metadata import POISON
from .onesided_plan import Span

ALIGN = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Its bytes, filled with POISON when it was taken."""

    address: int
    view: memoryview

    def poison(self) -> None:
        """Nothing in it can be taken for a record."""
        self.view[:] = bytes([POISON]) * len(self.view)


class Slots:
    """All of one session."""

    def __init__(self, size: int) -> None:
        self._memory = np.empty(size, np.uint8)  # touched only where a slot is taken
        self._view = self._memory.data
        self._taken: dict[int, Slot] = {}  # by start, counted from the beginning
        self.span = Span(self._memory.ctypes.data, size)

    def take(self, size: int) -> Slot | None:
        """A poisoned slot; None when there is no room for it."""
        start = 0
        for taken, slot in sorted(self._taken.items(), key=lambda each: each[0]):
            if taken - start >= max(size, 1):
                break
            start = taken + -(-max(len(slot.view), 1) // ALIGN) * ALIGN
        if start + max(size, 1) > self.span.size:
            return None
        made = Slot(self.span.address + start, self._view[start : start + size])
        made.poison()
        self._taken[start] = made
        return made

    def give(self, slot: Slot) -> None:
        """Nobody writes to it any more. Idempotent."""
        start = slot.address - self.span.address
        if self._taken.get(start) is slot:
            del self._taken[start]

    def __len__(self) -> int:
        return len(self._taken)


class Staging:
    """Bytes of one write that had to be copied where they are registered."""

    def __init__(self, slots: Slots, peer: str) -> None:
        self._slots, self._peer = slots, peer
        self._held: list[Slot] = []
        self._kept = False

    def put(self, data: memoryview) -> int:
        """Its address now. Raises Refused where there is no room."""
        slot = self._slots.take(len(data))
        if slot is None:
            reason = f"no room to stage {len(data)} bytes"
            raise Refused(self._peer, reason, Stage.VERIFY)
        slot.view[:] = data
        self._held.append(slot)
        return slot.address

    def keep(self) -> None:
        """From now on only `give` ends it."""
        self._kept = True

    def give(self) -> None:
        """The bytes are not read any more."""
        for slot in self._held:
            self._slots.give(slot)
        self._held.clear()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._kept:
            self.give()

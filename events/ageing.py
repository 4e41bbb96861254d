"""Ageing: which of too many rows goes first?

Pure. The oldest, as far as two bits of a row remember: rows made one after the other share an age
until a third of the room is full of them, then the next age begins; four go round in a circle. What
is left of the age that begins is taken for young: it outlived all others. Used by copies.py. Open
it to change what is given up first.

    age of rows   1 1 1 1 2 2 2 2 3 3 3 . .     now = 3, the next to go are those of 1
                                                (0 is empty), the least key first

A queue would say it more exactly, but would have to be written to the store with every block; this
is decided by the table alone, so that two ingests let the same rows go.
"""

from __future__ import annotations

from collections.abc import Callable

AGES = 4
ByAge = Callable[[int], list[bytes]]  # keys of all rows of one age


class Ageing:
    """Rows of one kind counted by age."""

    __slots__ = ("_going", "_going_age", "counts", "most", "now")

    def __init__(self, most: int, now: int) -> None:
        self.most, self.now = most, now
        self.counts = [0] * AGES
        self._going: list[bytes] = []  # the least key is last
        self._going_age = -1

    def reset(self) -> None:
        """No rows."""
        self.now, self.counts = 0, [0] * AGES
        self._going, self._going_age = [], -1

    def over(self) -> bool:
        """Are there too many?"""
        total = sum(self.counts)
        if total > self.most and self.counts[self.now] == total:
            self.turn()  # all came at once: they are of the past now
        return total > self.most

    def turn(self) -> None:
        """Begin the next age where this one has its share, once those of it that go are gone."""
        for _ in range(AGES - 1):
            if self.counts[self.now] * (AGES - 1) < self.most:
                return
            self.now = (self.now + 1) % AGES
            if self._going_age == self.now:
                self._going, self._going_age = [], -1  # others of this age are made again

    def oldest(self, by_age: ByAge, lives: Callable[[bytes, int], bool]) -> bytes:
        """Key of the row that goes next; there must be one."""
        after = ((self.now + step) % AGES for step in range(1, AGES + 1))
        age = next(age for age in after if self.counts[age])
        while True:
            if age != self._going_age or not self._going or age == self.now:
                self._going, self._going_age = sorted(by_age(age), reverse=True), age
            key = self._going.pop()
            if lives(key, age):
                return key

"""Runs: stretches of chained blocks that the same workers hold.

Pure: one run and what can be done to it alone; forest.py keeps many and says which block is where.
Open it to change how holders are written down.

    blocks   b0 b1 b2 b3 b4 b5         b0's parent is `parent`; b(i)'s parent is b(i-1)
    full     per tier, bitmap over ordinals: these hold every block of the run
    partial  slot -> bitmap over positions:  a slot (ordinal and tier) that holds some, not all
                 0b001111 = b0..b3,  0b111011 = all but b2 (a hole)

A block's hash names all blocks before it, so two sequences that agree at their last block agree
everywhere before: one comparison vouches for a whole run. The blocks are bare numbers side by side:
a fifth of the memory of Python's own, and nothing for its garbage collector to look at.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import eq
from sys import byteorder

import msgspec

TIERS = 4  # gpu, cpu, disk, remote: the low two bits of a slot
MOST_BLOCKS = 512  # of one run: a split moves at most that many
FEW = 16  # blocks: so many are looked at one by one as soon as they are halved twice
UNSURE = -1  # as owner of a run

Slot = int  # ordinal * 4 + tier
Full = tuple[int, int, int, int]  # bitmaps over ordinals, by tier


class Run(msgspec.Struct, gc=False, eq=False):
    """One stretch. Every method keeps `full` and `partial` exact and disjoint.

    A look for garbage passes it by, as it passes by all that is in it: there are hundreds of
    thousands, and everybody waits meanwhile.
    """

    parent: int | None
    blocks: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    full: Full = (0, 0, 0, 0)
    partial: dict[Slot, int] = {}
    children: int = 0  # runs whose parent is the last block
    family: int = -1  # as the forest counts
    next: Run | None = None  # of its family
    owner: Slot = UNSURE  # holds all of it, nobody else any of it: what most runs are, seen at once

    @property
    def anyone(self) -> int:
        """Ordinals that hold every block in one single tier."""
        full = self.full
        return full[0] | full[1] | full[2] | full[3]

    def position(self, block: int) -> int:
        """Where a block of this run is; -1 where it is not."""
        data, wanted = self.blocks.tobytes(), block.to_bytes(8, byteorder)
        at = data.find(wanted)
        while at & 7 and at >= 0:
            at = data.find(wanted, at + 1)
        return at >> 3

    def ending(self, asked: array[int], start: int) -> int:
        """How many blocks `asked[start:]` tells from the last one backwards, as caches let go of a
        prompt: all that are left, or all of the run; else 0."""
        mine = self.blocks[start - len(asked) :]
        mine.reverse()
        many = len(mine)
        return many if mine == asked[start : start + many] else 0

    def agreement(self, at: int, asked: Sequence[int], start: int) -> int:
        """How many blocks from position `at` equal `asked[start:]`; the first is known to."""
        blocks, ahead = self.blocks, start - at
        low, high = at, min(len(blocks), len(asked) - ahead) - 1
        if blocks[high] == asked[high + ahead]:
            return high + 1 - at
        while high - low > FEW:  # equal at low, different at high: bisect, equality is monotone
            middle = (low + high) // 2
            if blocks[middle] == asked[middle + ahead]:
                low = middle
            else:
                high = middle
        low += 1
        alike: int = sum(map(eq, blocks[low:high], asked[low + ahead : high + ahead]))
        return low - at + alike

    def stretch(self, asked: array[int], start: int, near: int) -> tuple[int, int]:
        """Lowest position of the blocks from `asked[start]` on that lie side by side here, in
        either direction, and how many; the first is known to be at `near`."""
        blocks, at, left = self.blocks, near, len(asked) - start
        if left == 1:
            return at, 1
        following = asked[start + 1]
        if at and blocks[at - 1] == following:  # backwards, as caches let go of a prompt
            mine = blocks[max(0, at + 1 - left) : at + 1]
            mine.reverse()
            count = _alike(mine, asked[start : start + len(mine)])
            return at + 1 - count, count
        if at + 1 < len(blocks) and blocks[at + 1] == following:
            mine = blocks[at : at + left]
            return at, _alike(mine, asked[start : start + len(mine)])
        return at, 1

    def bits(self, slot: Slot) -> int:
        """Positions a slot holds, as a bitmap."""
        if self.full[slot & 3] >> (slot >> 2) & 1:
            return (1 << len(self.blocks)) - 1
        return self.partial.get(slot, 0)

    def put(self, slot: Slot, bits: int) -> None:
        """Say exactly which positions a slot holds."""
        self.owner = UNSURE
        tier, one = slot & 3, 1 << (slot >> 2)
        if self.partial:
            self.partial.pop(slot, None)
        whole = bits == (1 << len(self.blocks)) - 1
        self.fill(tier, self.full[tier] | one if whole else self.full[tier] & ~one)
        if bits and not whole:
            self.partial[slot] = bits

    def fill(self, tier: int, ordinals: int) -> None:
        """Say exactly who holds every block in this tier."""
        told = list(self.full)
        told[tier] = ordinals
        gpu, cpu, disk, remote = told
        self.full = gpu, cpu, disk, remote

    def only(self, slot: Slot, alive: int) -> bool:
        """Whether this slot alone holds the run, and all of it: then the run may grow with it."""
        if self.owner == slot:
            return True
        one, full = 1 << (slot >> 2), self.full
        if self.partial or not full[slot & 3] & one:
            return False
        gpu, cpu, disk, remote = full
        if (gpu & alive) + (cpu & alive) + (disk & alive) + (remote & alive) != one:
            return False
        if gpu + cpu + disk + remote == one:  # nor is a dead one left that might come again
            self.owner = slot
        return True

    def union(self, alive: int) -> int:
        """Positions that anybody alive holds, as a bitmap."""
        if self.anyone & alive:
            return (1 << len(self.blocks)) - 1
        held = 0
        for slot, bits in self.partial.items():
            if alive >> (slot >> 2) & 1:
                held |= bits
        return held

    def holders(self, at: int, alive: int) -> dict[int, list[int]]:
        """Ordinal -> tiers that hold the block at this place, best first."""
        found = dict[int, list[int]]()
        slots = [o << 2 | tier for tier in range(TIERS) for o in ordinals(self.full[tier])]
        slots += [slot for slot, bits in self.partial.items() if bits >> at & 1]
        for slot in sorted(slots):
            if alive >> (slot >> 2) & 1:
                found.setdefault(slot >> 2, []).append(slot & 3)
        return found

    def held(self, ordinal: int) -> Iterator[tuple[int, int | None, list[int]]]:
        """(tier, parent, blocks) of everything an ordinal holds here."""
        for tier in range(TIERS):
            for start, stop in stretches(self.bits(ordinal << 2 | tier)):
                parent = self.blocks[start - 1] if start else self.parent
                yield tier, parent, self.blocks[start:stop].tolist()

    def cut(self, start: int, stop: int, alive: int) -> Run:
        """A new run of positions start..stop-1, with the holders that are alive."""
        part = Run(self.blocks[start - 1] if start else self.parent, self.blocks[start:stop])
        gpu, cpu, disk, remote = self.full
        part.full = gpu & alive, cpu & alive, disk & alive, remote & alive
        part.owner = self.owner if part.full == self.full else UNSURE
        mask = (1 << (stop - start)) - 1
        for slot, bits in self.partial.items():
            if alive >> (slot >> 2) & 1:
                part.put(slot, bits >> start & mask)
        return part

    def become(self, other: Run) -> None:
        """Take over what another run says; this object stays the one that others point to."""
        self.parent, self.blocks = other.parent, other.blocks
        self.full, self.partial, self.owner = other.full, other.partial, other.owner

    def scrub(self, dead: int) -> None:
        """Forget ordinals."""
        gpu, cpu, disk, remote = self.full
        self.full = gpu & ~dead, cpu & ~dead, disk & ~dead, remote & ~dead
        self.owner = UNSURE
        if self.partial:
            kept = self.partial.items()
            self.partial = {slot: bits for slot, bits in kept if not dead >> (slot >> 2) & 1}


def weight(runs: Iterable[Run]) -> int:
    """Bytes, about: a place in a run, a run with two names, and a partial holder each theirs."""
    return sum(9 * len(run.blocks) + 480 + 130 * len(run.partial) for run in runs)


@lru_cache(maxsize=16_384)
def alone(slot: Slot) -> Full:
    """`full` of a run that one slot holds: nearly all runs, so those of a slot share it."""
    told = [0] * TIERS
    told[slot & 3] = 1 << (slot >> 2)
    gpu, cpu, disk, remote = told
    return gpu, cpu, disk, remote


def _alike(mine: array[int], asked: array[int]) -> int:
    """How many of two equally long rows are equal, from the first on."""
    if mine == asked:
        return len(mine)
    return next(at for at, (one, other) in enumerate(zip(mine, asked, strict=True)) if one != other)


def ones(bits: int) -> int:
    """Length of the unbroken row of ones from bit 0: the position of the first zero."""
    return (~bits & (bits + 1)).bit_length() - 1


def ordinals(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def stretches(bits: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of every unbroken row of ones, ascending."""
    start = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        start, bits = start + zeros, bits >> zeros
        length = ones(bits)
        yield start, start + length
        start, bits = start + length, bits >> length

"""Forest: which run is a block in, and who holds how much of a chain?

Pure: blocks are numbers, holders are ordinals; view.py knows whose they are. Exact with holes,
orphans and any order: every block is found by its own hash, so no path has to be whole. Open it
to change how runs are made, split and thrown away.

    where: block -> its run                      asked  b0 b1 b2 b3 b4 x0 x1
    [b0 b1 b2] -+- [b3 b4]                       jump   [b0 b1 b2] -> [b3 b4] -> x0 unknown: end
                +- [c3 c4 c5]                    one look-up and one comparison per run

A run grows while one slot alone stores on; another child splits it there, so that branches begin
at ends of runs and holders of a run mostly hold all of it. A retired ordinal is dead at once;
`sweep` wipes its bits run by run, and only after a whole pass is the ordinal used again.

`where` holds a million of entries, and nobody else runs while Python looks after one dict: it is
parted by the first bits of a block (a dict that grows copies itself in one go, 45 ms for 700 k
blocks), the other 60 are the key (a larger number takes 48 bytes instead of 32), and it names runs
by number (plain numbers are nothing to the garbage collector, which would look at every entry again
and again, 130 ms each time).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from sys import getsizeof

from .runs import MOST_BLOCKS, TIERS, Run, Slot, alone, ordinals, stretches
from .steps import Step, settle

PARTS, SHIFT = 16, 60  # `where[block >> SHIFT][block & LOW]`, written out: a call costs as much
LOW = (1 << SHIFT) - 1
BIG, ROOMY, PACE = 100_000, 64, 65_536  # see _pack: entries, bytes an entry, blocks between looks


class Forest:
    """All runs of one view."""

    def __init__(self) -> None:
        self.where: list[dict[int, Run]] = [{} for _ in range(PARTS)]  # block -> its run
        self.alive = 0  # bitmap of ordinals
        self.untidy = False  # there is something to sweep
        self._runs: dict[int, Run] = {}
        self._named = 0  # runs made so far: the next one's number
        self._free: list[int] = []
        self._next = 0
        self._dead = 0  # retired since the present pass began
        self._passing = 0  # retired before it; free when it ends
        self._pass: list[int] = []
        self._grown = 0  # blocks since a dict was looked at
        self._turn = 0  # which one is next

    def __len__(self) -> int:
        return sum(map(len, self.where))

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self._runs)

    def take(self) -> int:
        """An ordinal that no bit anywhere belongs to."""
        ordinal = self._free.pop() if self._free else self._next
        if ordinal == self._next:
            self._next += 1
        self.alive |= 1 << ordinal
        return ordinal

    def retire(self, ordinal: int) -> None:
        """Forget all an ordinal holds, at once; its bits are wiped later."""
        self.alive &= ~(1 << ordinal)
        self._dead |= 1 << ordinal
        self.untidy = True

    # -- writing -----------------------------------------------------------------------------

    def store(self, slot: Slot, parent: int | None, blocks: Sequence[int]) -> int:
        """A slot holds these chained blocks now; returns how many it did not hold before."""
        added, at = 0, 0
        while at < len(blocks):
            block = blocks[at]
            run = self.where[block >> SHIFT].get(block & LOW)
            if run is None:
                taken = self._grow(slot, parent, blocks, at)
                added += taken
            else:
                had = run.bits(slot)
                first = run.position(block, had.bit_length())  # mostly it goes on where it ended
                taken = run.agreement(first, blocks, at)
                now = had | ((1 << taken) - 1) << first
                if now != had:
                    run.put(slot, now)
                    added += (now ^ had).bit_count()
            at += taken
            parent = blocks[at - 1]
        return added

    def _grow(self, slot: Slot, parent: int | None, blocks: Sequence[int], at: int) -> int:
        """Give unknown blocks a home behind `parent`; returns how many."""
        run, where = self._home(slot, parent), self.where
        fresh = blocks[at : at + MOST_BLOCKS - len(run.blocks)]
        for block in fresh:
            part, key = where[block >> SHIFT], block & LOW
            if key in part:
                fresh = fresh[: fresh.index(block)]
                break
            part[key] = run
        run.blocks.extend(array("Q", fresh))  # by way of another array in two thirds of the time
        self._grown += len(fresh)
        if self._grown > PACE:
            self.untidy = True
        return len(fresh)

    def _home(self, slot: Slot, parent: int | None) -> Run:
        """The run to append to: the parent's, where nobody else would be dragged along."""
        if parent is not None and (above := self._run(parent)) is not None:
            mine = above.blocks
            if mine[-1] != parent:
                self._split(above, above.position(parent) + 1)
            elif len(mine) < MOST_BLOCKS and above.only(slot, self.alive):
                return above
        return self._new(Run(parent, array("Q"), alone(slot), owner=slot))

    def _run(self, block: int) -> Run | None:
        return self.where[block >> SHIFT].get(block & LOW)

    def _new(self, run: Run) -> Run:
        run.number = self._named
        self._runs[run.number] = run
        self._named += 1
        return run

    def remove(self, slot: Slot, blocks: Sequence[int]) -> int:
        """A slot no longer holds these blocks, in any order; returns how many it did hold."""
        gone, at, count = 0, 0, len(blocks)
        while at < count:
            run = self._run(blocks[at])
            if run is None:
                at += 1
            elif run.owner == slot and (taken := run.ending(blocks, at)):
                gone += self._shorten(run, len(run.blocks) - taken, len(run.blocks))
                at += taken
            else:
                bits, taken = self._gather(run, blocks, at)
                at += taken
                gone += self._take(run, slot, bits)
        return gone

    def _gather(self, run: Run, blocks: Sequence[int], at: int) -> tuple[int, int]:
        """Positions of the blocks from `at` on that are in this run, and how many they are."""
        bits, near, start, count, where = 0, len(run.blocks) - 1, at, len(blocks), self.where
        while at < count and where[blocks[at] >> SHIFT].get(blocks[at] & LOW) is run:
            near, taken = run.stretch(blocks, at, near)
            bits |= ((1 << taken) - 1) << near
            at += taken
        return bits, at - start

    def _take(self, run: Run, slot: Slot, bits: int) -> int:
        """A slot gives up these positions; returns how many it did hold."""
        first, last = (bits & -bits).bit_length() - 1, bits.bit_length()
        at_an_end = not first or last == len(run.blocks)
        if at_an_end and bits.bit_count() == last - first and run.only(slot, self.alive):
            return self._shorten(run, first, last)
        return self._unmark(run, slot, bits)

    def _shorten(self, run: Run, first: int, last: int) -> int:
        """Throw away an end of a run that one slot alone holds, as engines mostly evict."""
        where, lost = self.where, run.blocks[first:last]
        for block in lost:
            del where[block >> SHIFT][block & LOW]
        if len(lost) == len(run.blocks):
            del self._runs[run.number]
        elif not first:
            run.parent = lost[-1]
        del run.blocks[first:last]
        return len(lost)

    def _unmark(self, run: Run, slot: Slot, bits: int) -> int:
        had = run.bits(slot)
        lost = had & bits
        if lost:
            run.put(slot, had ^ lost)
            self._tidy(run)
        return lost.bit_count()

    def drop_slot(self, slot: Slot) -> None:
        """Forget all one slot holds by looking at every run: one tier of one worker, rare."""
        for number in list(self._runs):
            if run := self._runs.get(number):
                self._unmark(run, slot, (1 << len(run.blocks)) - 1)

    # -- keeping it small --------------------------------------------------------------------

    def _split(self, run: Run, at: int) -> None:
        right = self._new(run.cut(at, len(run.blocks), self.alive))
        run.become(run.cut(0, at, self.alive))
        for block in right.blocks:
            self.where[block >> SHIFT][block & LOW] = right
        self._tidy(run)
        self._tidy(right)

    def _tidy(self, run: Run) -> None:
        """Throw away what nobody alive holds: at the ends, all of it, or most of it."""
        length, held = len(run.blocks), run.union(self.alive)
        if held == (1 << length) - 1:
            return
        first, last = (held & -held).bit_length() - 1 if held else length, held.bit_length()
        for block in run.blocks[:first] + run.blocks[max(first, last) :]:
            del self.where[block >> SHIFT][block & LOW]
        if not held:
            del self._runs[run.number]
            return
        if first or last < length:
            run.become(run.cut(first, last, self.alive))
        if held.bit_count() * 4 < last - first:
            self._split(run, (last - first) // 2)

    def sweep(self, most_runs: int = 256) -> bool:
        """Wipe bits of retired ordinals from some runs; True while there is more to do."""
        if self._grown > PACE:
            self._pack()
        if not self._passing:
            if not self._dead:
                self.untidy = False
                return False
            self._passing, self._dead, self._pass = self._dead, 0, list(self._runs)
        for _ in range(min(most_runs, len(self._pass))):
            if run := self._runs.get(self._pass.pop()):
                run.scrub(self._passing)
                self._tidy(run)
        if not self._pass:
            self._free.extend(ordinals(self._passing))
            self._passing = 0
        self.untidy = bool(self._passing or self._dead)
        return self.untidy

    def _pack(self) -> None:
        """Copy a big dict that has too much room: where many come and go Python makes it for three
        to six times what is in it, a copy has one and a half to three. 10 ms for 250 k blocks."""
        self._grown, self._turn = 0, (self._turn + 1) % PARTS
        part = self.where[self._turn]
        if len(part) >= BIG and getsizeof(part) > ROOMY * len(part):
            self.where[self._turn] = dict(part)
            self._grown = PACE - max(PACE, len(part) // 4)

    # -- asking ------------------------------------------------------------------------------

    def depths(self, blocks: Sequence[int], among: int) -> tuple[list[tuple[int, int]], list[Step]]:
        """How far the unbroken prefix of each ordinal in `among` goes.

        Returns (bitmap of ordinals, depth) pairs that part `among`, and the runs on the way.
        """
        found: list[tuple[int, int]] = []
        path: list[Step] = []
        at, left = 0, among & self.alive
        if left != among:
            found.append((among & ~left, 0))
        while left and at < len(blocks):
            run = self.where[blocks[at] >> SHIFT].get(blocks[at] & LOW)
            if run is None:
                break
            first = 0 if run.blocks[0] == blocks[at] else run.position(blocks[at])
            count = run.agreement(first, blocks, at)
            stay = run.anyone & left
            if stay != left:
                stay |= settle(found, run, left ^ stay, first, count, at)
            path.append((run, first, count))
            left = stay
            at += count
        if left:
            found.append((left, at))
        return found, path

    def holders(self, block: int) -> dict[int, list[int]]:
        """Ordinal -> tiers that hold a block, best first."""
        run, found = self._run(block), dict[int, list[int]]()
        if run is None:
            return found
        at = run.position(block)
        slots = [o << 2 | tier for tier in range(TIERS) for o in ordinals(run.full[tier])]
        slots += [slot for slot, bits in run.partial.items() if bits >> at & 1]
        for slot in sorted(slots):
            if self.alive >> (slot >> 2) & 1:
                found.setdefault(slot >> 2, []).append(slot & 3)
        return found

    def held(self, ordinal: int) -> Iterator[tuple[int, int | None, list[int]]]:
        """(tier, parent, blocks) of everything an ordinal holds; looks at every run."""
        for run in list(self._runs.values()):
            for tier in range(TIERS):
                for start, stop in stretches(run.bits(ordinal << 2 | tier)):
                    parent = run.blocks[start - 1] if start else run.parent
                    yield tier, parent, run.blocks[start:stop].tolist()

    def bytes(self) -> int:
        """What all this weighs: dicts as they are; a key, a place in a run, a run and a partial
        holder each their price."""
        partial = sum(len(run.partial) for run in self._runs.values())
        dicts = sum(map(getsizeof, self.where))
        return dicts + len(self) * 41 + len(self._runs) * 420 + partial * 130

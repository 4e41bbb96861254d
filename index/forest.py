"""Forest: which run is a block in, and who holds how much of a chain?

Pure: blocks are numbers, holders are ordinals; view.py knows whose they are. Exact with holes,
orphans and any order. Open it to change how runs are made, split and thrown away.

    heads, tails: block -> its run               asked  b0 b1 b2 b3 b4 x0 x1
    [b0 b1 b2] -+- [b3 b4]                       jump   [b0 b1 b2] -> [b3 b4] -> x0 unknown: end
                +- [c3 c4 c5]                    one look-up and one comparison per run

A block's hash names all blocks before it. So a block that begins no run lies right behind its
parent, and a prompt is walked by heads alone; only who branches, or removes, from the middle of a
run asks families.py for it. So a store costs as much as an event, hardly more for its blocks.

A run grows while one slot alone stores on; another child splits it there, so that branches begin
at ends of runs and holders of a run mostly hold all of it. A retired ordinal is dead at once;
`sweep` wipes its bits run by run, and only after a whole pass is the ordinal used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from .ends import Ends
from .families import Families
from .runs import MOST_BLOCKS, Run, Slot, alone, ordinals
from .steps import Step, settle
from .unrolled import Unrolled

MISSED = 16  # blocks looked for in vain, before the rest of them is sifted


class Forest:
    """All runs of one view."""

    def __init__(self) -> None:
        self._ends = Ends()
        self.heads, self.tails = self._ends.heads, self._ends.tails  # block -> its run
        self.alive = 0  # bitmap of ordinals
        self.blocks = 0  # distinct ones
        self.untidy = False  # there is something to sweep
        self._families = Families()
        self._stored: dict[Slot, Run] = {}  # where it did so last
        self._removed: dict[Slot, Run] = {}
        self._free, self._next = list[int](), 0  # ordinals
        self._dead = self._passing = 0  # retired since the present pass began; before it
        self._pass: list[Run] = []

    def take(self) -> int:
        """An ordinal that no bit anywhere belongs to."""
        ordinal = self._free.pop() if self._free else self._next
        self._next = max(self._next, ordinal + 1)
        self.alive |= 1 << ordinal
        return ordinal

    def retire(self, ordinal: int) -> None:
        """Forget all an ordinal holds, at once; its bits are wiped later."""
        self.alive &= ~(1 << ordinal)
        self._dead |= 1 << ordinal
        self.untidy = True

    def store(self, slot: Slot, parent: int | None, blocks: Sequence[int]) -> int:
        """A slot holds these chained blocks now; returns how many it did not hold before."""
        if not isinstance(blocks, array):
            blocks = array("Q", blocks)
        added, at, count = 0, 0, len(blocks)
        run: Run | None = None
        while at < count:
            if (known := self.heads.get(blocks[at])) is not None:  # where it is, or would be
                run, first = known, 0
            elif not at:
                run, first = self._behind(slot, parent)
            if run is None or first == len(run.blocks) or run.blocks[first] != blocks[at]:
                run = self._home(slot, blocks[at - 1] if at else parent, run, first)
                taken = self._grow(run, blocks, at)
                first = len(run.blocks)
                added += taken
            else:
                taken = run.agreement(first, blocks, at)
                had = run.bits(slot)
                now = had | ((1 << taken) - 1) << first
                if now != had:
                    run.put(slot, now)
                    added += (now ^ had).bit_count()
                first += taken
            at += taken
        if run is not None:
            self._stored[slot] = run
        return added

    def _behind(self, slot: Slot, parent: int | None) -> tuple[Run | None, int]:
        """The place after a block."""
        if parent is None:
            return None, 0
        if (run := self.tails.get(parent)) is not None:
            return run, len(run.blocks)
        run, at = self._find(parent, self._stored.get(slot), slot)
        return run, at + 1

    def _find(self, block: int, guess: Run | None, slot: Slot) -> tuple[Run | None, int]:
        """Any block; first where the slot's part of a guessed run ends, then anywhere in it."""
        if guess is not None:
            at = guess.bits(slot).bit_length() - 1
            if 0 <= at < len(guess.blocks) and guess.blocks[at] == block:
                return guess, at
            if (at := guess.position(block)) >= 0:
                return guess, at
        return self._families.find(block)

    def _grow(self, run: Run, blocks: array[int], at: int) -> int:
        """Blocks that nobody told of go to the end of a run; returns how many."""
        mine = run.blocks
        fresh = blocks[at : at + MOST_BLOCKS - len(mine)]
        awaited = self._ends.awaited
        if awaited and not awaited.keys().isdisjoint(fresh):  # runs begin behind one: an end
            fresh = fresh[: 1 + next(n for n, block in enumerate(fresh) if block in awaited)]
            run.children = awaited.pop(fresh[-1])
        if mine:
            self.tails.pop(mine[-1], None)
        else:
            self.heads[fresh[0]] = run
        mine.extend(fresh)
        self.tails[fresh[-1]] = run
        self.blocks += len(fresh)
        self._families.note(run.family, fresh)
        return len(fresh)

    def _home(self, slot: Slot, parent: int | None, above: Run | None, first: int) -> Run:
        """The run to append to: the parent's, where nobody else would be dragged along."""
        if above is not None:
            if first < len(above.blocks):
                self._split(above, first)
            elif first < MOST_BLOCKS and not above.children and above.only(slot, self.alive):
                return above
        self._ends.fork(parent, 1)
        run = self._families.begin(Run(parent, array("Q"), alone(slot), owner=slot))
        if self._families.stale(self.blocks):
            self.untidy = True
        return run

    def remove(self, slot: Slot, blocks: Sequence[int]) -> int:
        """A slot no longer holds these blocks, in any order; returns how many it did hold."""
        if not isinstance(blocks, array):
            blocks = array("Q", blocks)
        gone, at, missed = 0, 0, 0
        while at < len(blocks):
            run, near = self._place(slot, blocks[at])
            if run is None:
                at, missed = at + 1, missed + 1
                if missed == MISSED:
                    blocks, at = self._families.sift(blocks[at:]), 0
                continue
            if run.owner == slot and (taken := run.ending(blocks, at)):
                gone += self._shorten(run, len(run.blocks) - taken, len(run.blocks))
            else:
                low, taken = run.stretch(blocks, at, near)
                gone += self._take(run, slot, low, low + taken)
                self._removed[slot] = run
            at += taken
        return gone

    def _place(self, slot: Slot, block: int) -> tuple[Run | None, int]:
        """Where a block is that a slot gives up."""
        if (run := self.tails.get(block)) is not None:
            return run, len(run.blocks) - 1
        if (run := self.heads.get(block)) is not None:
            return run, 0
        return self._find(block, self._removed.get(slot), slot)

    def _take(self, run: Run, slot: Slot, first: int, last: int) -> int:
        """A slot gives up first..last-1; returns how many it did hold."""
        if (not first or last == len(run.blocks)) and run.only(slot, self.alive):
            return self._shorten(run, first, last)
        return self._unmark(run, slot, ((1 << (last - first)) - 1) << first)

    def _unmark(self, run: Run, slot: Slot, bits: int) -> int:
        had = run.bits(slot)
        if lost := had & bits:
            run.put(slot, had ^ lost)
            self._tidy(run)
        return lost.bit_count()

    def drop_slot(self, slot: Slot) -> None:
        """Forget all one slot holds by looking at every run: one tier of one worker, rare."""
        for run in list(self.heads.values()):
            self._unmark(run, slot, (1 << len(run.blocks)) - 1)

    # -- keeping it small --------------------------------------------------------------------

    def _shorten(self, run: Run, first: int, last: int) -> int:
        """Throw away an end of a run, or all of it."""
        self._ends.shorten(run, first, last)
        if last - first == len(run.blocks):
            self._families.leave(run)
        del run.blocks[first:last]
        self.blocks -= last - first
        return last - first

    def _split(self, run: Run, at: int) -> None:
        right = run.cut(at, len(run.blocks), self.alive)
        run.become(run.cut(0, at, self.alive))
        self._families.split(run, right)
        self._ends.split(run, right)
        self._tidy(run)
        self._tidy(right)

    def _tidy(self, run: Run) -> None:
        """Throw away what nobody alive holds: at the ends, all of it, or most of it."""
        length, held = len(run.blocks), run.union(self.alive)
        if held == (1 << length) - 1:
            return
        if not held:
            self._shorten(run, 0, length)
            return
        first, last = (held & -held).bit_length() - 1, held.bit_length()
        if first or last < length:
            kept = run.cut(first, last, self.alive)
            if last < length:
                self._shorten(run, last, length)
            if first:
                self._shorten(run, 0, first)
            run.become(kept)
        if held.bit_count() * 4 < last - first:
            self._split(run, (last - first) // 2)

    def sweep(self, most_runs: int = 256) -> bool:
        """Wipe bits of retired ordinals from some runs; True while there is more to do."""
        if not self._pass:
            self._begin()
        for _ in range(min(most_runs, len(self._pass))):
            run = self._pass.pop()
            self._families.again(run)
            if self._passing and run.blocks:
                run.scrub(self._passing)
                self._tidy(run)
        if not self._pass:
            self._free.extend(ordinals(self._passing))
            self._passing = 0
            self._families.renewed()
        self.untidy = bool(self._pass or self._dead)
        return self.untidy

    def _begin(self) -> None:
        """The next pass over all runs, where there is a reason for one."""
        if stale := self._families.stale(self.blocks):
            self._families.renew()
        self._passing, self._dead = self._dead, 0
        if stale or self._passing:
            self._pass = list(self.heads.values())

    # -- asking ------------------------------------------------------------------------------

    def depths(self, blocks: Sequence[int], among: int) -> tuple[list[tuple[int, int]], list[Step]]:
        """How far the unbroken prefix of each ordinal in `among` goes; a prompt's first block
        begins a run, or nobody holds it. Returns (bitmap of ordinals, depth) pairs that part
        `among`, and the runs on the way.
        """
        at, end, left, heads = 0, len(blocks), among & self.alive, self.heads
        late = blocks if type(blocks) is Unrolled else None  # named no further than needed
        if late is not None:
            late.unroll(1)
            blocks = late.found
        found: list[tuple[int, int]] = [] if left == among else [(among & ~left, 0)]
        path: list[Step] = []
        while left and at < end:
            if (run := heads.get(blocks[at])) is None:
                break
            mine = run.blocks
            count = len(mine)
            if late is not None:
                count = late.agreement(at, mine)
            elif at + count > end or blocks[at + count - 1] != mine[-1]:
                count = run.agreement(0, blocks, at)
            path.append((run, 0, count))
            gpu, cpu, disk, remote = run.full
            stay = (gpu | cpu | disk | remote) & left
            if stay != left:
                if run.partial:
                    stay |= settle(found, run, left ^ stay, 0, count, at)
                else:
                    found.append((left ^ stay, at))
                left = stay
            at += count
        if left:
            found.append((left, at))
        return found, path

    def holders(self, block: int) -> dict[int, list[int]]:
        """Ordinal -> tiers that hold a block, best first."""
        run, at = self._find(block, None, 0)
        return {} if run is None else run.holders(at, self.alive)

    def held(self, ordinal: int) -> Iterator[tuple[int, int | None, list[int]]]:
        """(tier, parent, blocks) of everything an ordinal holds; looks at every run."""
        for run in list(self.heads.values()):
            yield from run.held(ordinal)

    def bytes(self) -> int:
        """What all this weighs."""
        return self._ends.bytes() + self._families.bytes()

"""Facts: what is known of one worker beside its blocks, and who may be believed about it.

Pure: values of view.py, which alone writes them. Open it to change whose word counts.

    known   by ingest:  1a exact   2b dark   3c partial     living 1a 3c: 1a's, the best of them
    groups  by number:  1 window 128 tokens, its blocks per tier; not counted, it only caps depth
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvplane.vocabulary import Change, Cleared, ClearReason, Epoch, Group, Knowledge, Known, Worker

from .runs import TIERS as TIER_COUNT

MOST_KNOWN = 16  # words kept of one worker: many times the ingests that follow it at once
_RANK = {state: number for number, state in enumerate(Knowledge)}  # worst last


@dataclass(slots=True)
class Further:
    """A further cache group of one worker: its rule, and the blocks it holds in each tier."""

    rule: Group
    held: list[set[int]] = field(default_factory=lambda: [set() for _ in range(TIER_COUNT)])

    def tiers(self) -> list[set[int]]:
        """What it holds, in the tiers where there is something."""
        return [blocks for blocks in self.held if blocks]

    def clear(self, tier: int | None = None) -> None:
        """Nothing is held any more, in one tier or in all; the rule stays."""
        for number, blocks in enumerate(self.held):
            if tier is None or number == tier:
                blocks.clear()


@dataclass(slots=True)
class Facts:
    """What is known of one worker beside its blocks. Read it; only the view writes."""

    worker: Worker
    epoch: Epoch
    ordinal: int | None = None  # None until it stores something
    counts: list[int] = field(default_factory=lambda: [0] * TIER_COUNT)  # blocks per tier
    last: int | None = None  # number of the last batch applied
    heard: float | None = None  # wall clock of that, seconds
    block_size: int | None = None  # tokens
    known: dict[str, Known] = field(default_factory=dict)  # what each ingest last told
    gaps: int = 0  # gaps that stayed open, in all lives seen
    groups: dict[int, Further] = field(default_factory=dict)  # beside the counted one, by number

    def told(self, known: Known, living: Collection[str] | None) -> None:
        """Keep the word of one ingest; ingests come and go, so the oldest of the dead give way."""
        self.known.pop(known.by, None)
        self.known[known.by] = known
        if len(self.known) > MOST_KNOWN:
            dead = [by for by in self.known if living is None or by not in living]
            del self.known[dead[0] if dead else next(iter(self.known))]


@dataclass(frozen=True, slots=True)
class Size:
    """How big the view is."""

    workers: int
    blocks: int  # distinct
    holdings: int  # a block once per worker and tier
    runs: int
    bytes: int  # estimated


def believed(facts: Facts, living: Collection[str] | None, cut_off: bool = False) -> Known | None:
    """The best that a living ingest says (of equals the newest); None where nobody ever did.

    Any of them that is exact is right, for what it says of itself is that it missed nothing; one
    that lost its way does not make another worse. None as `living`: all are taken to live. Who is
    `cut_off` from us may have been told since that it is not exact.
    """
    if not facts.known:
        return None
    told = [known for by, known in facts.known.items() if living is None or by in living]
    if told:
        best = told[0]
        if len(told) > 1:
            best = min(told, key=lambda known: (_RANK[known.state], -known.since))
        if cut_off and best.state is Knowledge.EXACT:
            reason = "the part of the index store that holds it does not answer"
            return replace(best, state=Knowledge.PARTIAL, reason=reason)
        return best
    newest = max(facts.known.values(), key=lambda known: known.since)
    who = f"the last one was {newest.by}" if newest.by else "the last one did not give its name"
    reason = f"no living ingest follows it: {who}"
    return Known(facts.worker, facts.epoch, Knowledge.DARK, reason, newest.since, newest.by)


def is_gap(change: Change) -> bool:
    """Is this what is said where batches were lost for good?"""
    return isinstance(change, Cleared) and change.reason is ClearReason.GAP

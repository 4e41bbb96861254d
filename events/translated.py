"""Translated: what do some events of an engine mean for us?

Pure: the noun that translation.py returns and its helpers fill, and the closed sets of reasons.
Neighbours are gathered into one change, since engines send one hash an event. Open it to say one
more thing about a batch.

    here(b1) here(b2) -> Stored(b1 b2)        gone(b4) gone(b3) -> Removed(b4 b3)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvplane.index import TIERS, Value
from kvplane.vocabulary import BlockHash, Change, Epoch, Group, Removed, Stored, Tier, Worker

AT = {tier: position for position, tier in enumerate(TIERS)}
LEFT_OUT = (  # closed set of reasons; labels of a counter
    "orphan",  # its parent is not known: it waits for it
    "sparse",  # hashes of some blocks only, and nobody says which: positions cannot be counted
    "group",  # a cache group that we cannot cap by
    "placeholder",  # names blocks without tokens that nobody explained yet: they wait
    "extra-keys",  # images in chunks of several blocks: nobody says in which
    "block-size",  # blocks of another size than the worker's
    "unknown-removal",  # takes away what we do not have
    "expired",  # waited too long, or too many waited; or a tier that never removes, too old
    "cap",  # the oldest blocks of a worker that holds too many
)
WAITING = ("kept", "resolved", "removed", "expired")  # what became of blocks that wait


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one worker is kept; ages are differences of the engine's own clock."""

    most_blocks: int = 4_000_000  # rows with copies
    most_aliases: int = 65_536  # rows without any, kept for lower tiers that name only hashes
    most_waiting: int = 8_192  # blocks
    most_waiting_bytes: int = 4 << 20
    waiting_s: float = 600.0
    waiting_batches: int = 100_000
    chunk_s: float = 3600.0  # stores of tiers that never tell a removal


def _none() -> dict[str, int]:
    return defaultdict(int)  # a Counter takes eight times as long to make


@dataclass(slots=True)
class Translation:
    """What some events mean; `rows` are absolute, None deletes."""

    changes: list[Change] = field(default_factory=list)
    rows: dict[bytes, Value | None] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=_none)  # see LEFT_OUT
    waiting: dict[str, int] = field(default_factory=_none)  # blocks; see WAITING
    cleared: bool = False  # the engine dropped its cache: all before is settled
    caveat: str = ""  # why a depth may be more than the engine serves; see memo.py
    _run: list[BlockHash] = field(default_factory=list)  # of the change being gathered
    _of: Stored | Removed | None = None

    def say(self, change: Change) -> None:
        """Append a change after all before it."""
        if self._of is not None:
            self.settle()
        self.changes.append(change)

    def here(
        self,
        who: tuple[Worker, Epoch],
        tier: Tier,
        parent: BlockHash | None,
        block: BlockHash,
        size: int,
        group: Group | None = None,
    ) -> None:
        """One block is held in one tier now."""
        of = self._of
        if (
            type(of) is not Stored
            or (of.tier, of.group, of.block_size) != (tier, group, size)
            or self._run[-1] != parent
        ):
            self.settle()
            self._of = Stored(*who, tier, parent, (), size, group)
        self._run.append(block)

    def gone(
        self,
        who: tuple[Worker, Epoch],
        tier: Tier,
        blocks: Iterable[BlockHash],
        group: int | None,
    ) -> None:
        """These blocks are no longer held in one tier."""
        of = self._of
        if type(of) is not Removed or of.tier is not tier or of.group != group:
            self.settle()
            self._of = Removed(*who, tier, (), group)
        self._run += blocks

    def settle(self) -> None:
        """Close the change that is being gathered."""
        of, run = self._of, tuple(self._run)
        if isinstance(of, Stored):
            self.changes.append(
                Stored(of.worker, of.epoch, of.tier, of.parent, run, of.block_size, of.group)
            )
        elif isinstance(of, Removed):
            self.changes.append(Removed(of.worker, of.epoch, of.tier, run, of.group))
        self._of = None
        self._run.clear()

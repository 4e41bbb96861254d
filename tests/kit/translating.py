"""Translating: engine events as tests write them, and what readers make of the changes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvplane.events import BlocksRemoved, BlocksStored, EngineEvent, Translation, engine_key
from kvplane.events.translation import Limits, Translator
from kvplane.index import Row, Value, View, chain
from kvplane.index.stores.rows import decode, encode, group_of
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    Epoch,
    Namespace,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

SIZE = 4  # tokens of a block
P, Q = Worker(Pod("p")), Worker(Pod("q"))
Held = dict[tuple[Tier, int | None], set[BlockHash]]  # tier, further group -> blocks


def tokens_of(blocks: int, first: int = 100) -> list[int]:
    return list(range(first, first + blocks * SIZE))


def blocks_of(tokens: Sequence[int], size: int = SIZE, **space: str) -> tuple[BlockHash, ...]:
    return chain(tokens, Namespace("m", size, **space)).blocks


def keys_of(*numbers: int) -> tuple[bytes, ...]:
    return tuple(engine_key(number) for number in numbers)


def stored(
    names: Sequence[int | bytes],
    tokens: Sequence[int] = (),
    parent: int | bytes | None = None,
    size: int = SIZE,
    tier: Tier = Tier.GPU,
    **facts: object,
) -> BlocksStored:
    """`names`: hashes as the engine says them."""
    above = None if parent is None else engine_key(parent)
    hashes = tuple(engine_key(name) for name in names)
    size = size if tokens else 0
    return BlocksStored(hashes, above, array("I", tokens), size, tier, **facts)  # type: ignore[arg-type]


def removed(*names: int | bytes, tier: Tier = Tier.GPU, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(tuple(engine_key(name) for name in names), tier, group)


class Ingest:
    """A translator, the table it wrote, and what two kinds of readers make of its changes.

    `forgets`: made anew from the written table before each batch, as after a restart.
    """

    def __init__(
        self,
        worker: Worker = P,
        copies: bool = True,
        limits: Limits | None = None,
        forgets: bool = False,
        view: View | None = None,
        model: str = "m",
    ) -> None:
        self.worker, self.view = worker, view or View()
        self._copies, self._limits, self._forgets, self._model = copies, limits, forgets, model
        self.table: dict[bytes, Value] = {}  # as the store has it
        self.held: Held = {}
        self.sequence = -1
        self.translator = self._fresh()

    def _fresh(self) -> Translator:
        """From bytes that went through a store, in another order."""
        read = {key: decode(encode(value)) for key, value in sorted(self.table.items())}
        return Translator(
            self.worker, Epoch(1), self._model, read, self._copies, limits=self._limits
        )

    def hear(self, *events: EngineEvent, ts: float = 0.0) -> Translation:
        """The next batch."""
        if self._forgets:
            self.translator = self._fresh()
        self.sequence += 1
        out = self.translator.translate(events, ts, self.sequence)
        for key, value in out.rows.items():
            if value is None:
                self.table.pop(key, None)
            else:
                self.table[key] = value
        for change in out.changes:
            self.view.apply(change)
            note(self.held, change)
        return out

    def blocks(self, tier: Tier = Tier.GPU, group: int | None = None) -> set[BlockHash]:
        return self.held.get((tier, group), set())

    def rows(self) -> dict[bytes, Row]:
        return {key: row for key, row in self.table.items() if isinstance(row, Row)}

    def copies(self, name: int | bytes) -> tuple[int, ...]:
        row = self.table.get(engine_key(name))
        return row.copies if isinstance(row, Row) else (0, 0, 0, 0)

    def depth(self, tokens: Sequence[int], size: int = SIZE, **space: str) -> int:
        """Blocks of a prompt that the view finds usable, in any tier."""
        found = self.view.depths(blocks_of(tokens, size, **space), [self.worker])
        return found[self.worker][0] if self.worker in found else 0


def note(held: Held, change: object) -> None:
    """The plainest reader there can be."""
    if isinstance(change, Cleared):
        held.clear()
    elif isinstance(change, Stored):
        number = None if change.group is None else change.group.number
        held.setdefault((change.tier, number), set()).update(change.blocks)
    elif isinstance(change, Removed):
        held.setdefault((change.tier, change.group), set()).difference_update(change.blocks)


def held_by(table: dict[bytes, Value]) -> Held:
    """What the rows of a table say, for comparison with what the changes said."""
    held: Held = {}
    for key, row in table.items():
        if isinstance(row, Row):
            for tier, count in zip(Tier, row.copies, strict=True):
                if count:
                    held.setdefault((tier, group_of(key)), set()).add(row.block)
    return held

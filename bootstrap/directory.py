"""Directory: which ranks of one prefill instance are in, where, and in which life?

Pure: time is an argument. api.py feeds it and lookups.py answers from it. Open it to change when an
instance counts as complete, or what happens when a rank comes back.

The gate opens when every cell of the grid is taken (SGLang counts calls; a repeat opens its gate
early). What a rank says of the whole instance (sizes, page size, dtype ...) is that of the first
rank. One that differs:
  in a cell of its own         taken, listed in `differing` (SGLang demands it: first wins)
  same address or generation   refused with both values: no restart explains it
  outside the grid             refused: nobody would ever ask for it
A new life of the instance is told in one of two ways:
  generation given   another one than the table's: a NEW table; one that was replaced: LateLife
  none given         a known rank under another address: a new life begins, and the addresses of the
                     others are in doubt, withheld until they register again (or, so that one rank
                     that moved alone locks nobody out, for `doubt_s` seconds)

    A B complete | C for A: B in doubt, gate closed | D for B: complete again, in one new life
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from kvplane.vocabulary import Generation

from .addresses import Address
from .differences import LATCHED_LATER, differences, is_inside, refuse
from .errors import LateLife
from .registration import Facts, Place, Registration
from .topology import FOLLOW_ROOM, Topology

PAST = 256  # replaced generations that are refused from then on
LISTED = 16  # differences that are listed
EVENTS = 100  # take-overs that are remembered

Cell = tuple[int, int, int, int]  # dp, cp, tp, pp


@dataclass(slots=True)
class Entry:
    """One rank that is in."""

    address: Address
    raw_ip: str
    place: Place  # as it was sent: a text is never found by its number
    facts: Facts  # as this rank told them
    plain_dp: bool
    doubted_until: float = 0.0  # withheld before; 0 = never doubted

    def trusted(self, now: float) -> bool:
        """Whether its address may be handed out."""
        return now >= self.doubted_until


@dataclass(frozen=True, slots=True)
class Takeover:
    """A rank's place went to another address."""

    cell: Cell
    old: Address
    new: Address
    generation: Generation  # the instance's from then on
    at: float  # monotonic


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a registration did, for logs and counters."""

    new_life: bool = False
    replaced: Address | None = None  # who was in the same place under another address
    differing: tuple[str, ...] = ()  # facts that are not the instance's; ignored
    again: bool = False  # it was in already, at this address: nothing new


class Directory:
    """The rank table of one prefill instance."""

    def __init__(
        self, start: Generation, doubt_s: float = 60.0, owner: Generation | None = None
    ) -> None:
        """`start` names this process's life: generations made here never meet another's.

        `owner`: the only life that may name itself here. A directory that ends with its instance
        has one: it comes back empty, and a rank of the life before must not make it its own.
        """
        self._start, self._doubt_s, self._owner = start, doubt_s, owner
        self._lives = 0
        self._given: Generation | None = None  # what ranks of this table called their life
        self._past: deque[Generation] = deque(maxlen=PAST)
        self._facts: Facts | None = None
        self._plain_dp = False
        self._table: dict[Cell, Entry] = {}
        self._before: dict[Cell, Address] = {}  # who was where in the lives before
        self._doubted: set[Cell] = set()  # cells that are withheld until `_doubt_end`
        self._doubt_end = 0.0
        self._missing: tuple[tuple[int, bool], list[Cell]] | None = None  # counted in a phase
        self.differing: deque[str] = deque(maxlen=LISTED)
        self.takeovers: deque[Takeover] = deque(maxlen=EVENTS)
        self.sent: frozenset[str] = frozenset()  # newer members that ranks of this life know
        self.version = 0  # moves with every accepted registration
        self.generation = Generation(f"{start}.0")  # this life of the instance; equality only

    @property
    def facts(self) -> Facts | None:
        """What the instance is; None before its first rank."""
        return self._facts

    def phase(self, now: float) -> tuple[int, bool]:
        """While this stays the same, so does every answer: they may be cached by it."""
        return self.version, now >= self._doubt_end

    def register(
        self, new: Registration, now: float = 0.0, generation: Generation | None = None
    ) -> Accepted:
        """Take a rank in. Raises Inconsistent or LateLife, and nothing is changed then."""
        life, cell = new.generation or generation, new.place.cell
        if life is not None and (life in self._past or self._owner not in (None, life)):
            raise LateLife(life, self._owner or self.generation)
        known = self._table.get(cell)
        moved = known is not None and known.address != new.address
        new_life = self._is_new_life(life, new, known if moved else None, now)
        if self._facts is not None and not new_life:
            same = self._says_otherwise(new, known, moved, life)
            refuse(self._facts, self._plain_dp, new, same)
        if new_life:
            self._begin(life, new, now)
        if life is not None:
            self._given = life
        self.generation = self._given or Generation(f"{self._start}.{self._lives}")
        self.version += 1
        differing = self._latch(new)
        again = known is not None and not moved and not new_life and known.trusted(now)
        self._enter(cell, new)
        return Accepted(new_life, self._replaced(cell, known, new.address, now), differing, again)

    def _says_otherwise(
        self, new: Registration, known: Entry | None, moved: bool, life: Generation | None
    ) -> bool:
        """Whether no restart explains a difference; one that repeats itself is not asked."""
        if known is not None and not moved:
            return bool(differences(known.facts, known.plain_dp, new))
        return life is not None and life == self._given

    def _is_new_life(
        self, life: Generation | None, new: Registration, left: Entry | None, now: float
    ) -> bool:
        """`left` is who was in the same cell under another address."""
        if self._facts is None:
            return False
        if life is not None and self._given is not None:
            return life != self._given  # a rank that moved within its life is no new life
        if life is not None:
            return True  # the table was made by ranks that do not tell theirs
        if left is None:
            return False
        return left.trusted(now) or bool(differences(self._facts, self._plain_dp, new))

    def _begin(self, life: Generation | None, new: Registration, now: float) -> None:
        """A new life: addresses of the old one go, or are in doubt where we only guess."""
        if self._given is not None:
            self._past.append(self._given)
        self._given, self._lives = None, self._lives + 1
        self.differing.clear()
        kept = self._table if life is None else {}
        if life is not None or (self._facts and differences(self._facts, self._plain_dp, new)):
            # What came back is of another shape. A rank that already said so is of the new life.
            kept = {c: e for c, e in kept.items() if not differences(e.facts, e.plain_dp, new)}
            owners = self._before | {c: e.address for c, e in self._table.items()}
            self._before = {c: a for c, a in owners.items() if is_inside(c, new.facts)}
            self._facts, self.sent = None, frozenset()
        self._table, self._doubted, self._doubt_end = kept, set(kept), now + self._doubt_s
        for entry in kept.values():
            entry.doubted_until = self._doubt_end

    def _latch(self, new: Registration) -> tuple[str, ...]:
        """First wins; a null is filled by the first who knows. What differs is remembered."""
        self.sent |= new.sent
        if self._facts is None:
            self._facts, self._plain_dp = new.facts, new.plain_dp
            return ()
        facts = self._facts
        late = {n: getattr(new.facts, n) for n in LATCHED_LATER if getattr(facts, n) is None}
        self._facts = replace(facts, **late)
        differing = differences(self._facts, self._plain_dp, new)
        self.differing.extend(f"{place_text(new.place.cell)}: {what}" for what in differing)
        return differing

    def _enter(self, cell: Cell, new: Registration) -> None:
        facts = self._facts if self._facts == new.facts and self._facts else new.facts
        self._table[cell] = Entry(new.address, new.raw_ip, new.place, facts, new.plain_dp)
        self._doubted.discard(cell)

    def _replaced(
        self, cell: Cell, known: Entry | None, address: Address, now: float
    ) -> Address | None:
        """Who was in the cell before under another address; it becomes an event."""
        before = self._before.pop(cell, None)
        old = known.address if known is not None else before
        if old is None or old == address:
            return None
        self.takeovers.append(Takeover(cell, old, address, self.generation, now))
        return old

    def trusted(self, now: float = 0.0) -> dict[Cell, Entry]:
        """The ranks whose addresses may be handed out."""
        return {cell: entry for cell, entry in self._table.items() if entry.trusted(now)}

    def table(self) -> dict[Cell, Entry]:
        """All ranks, those in doubt too; for people."""
        return dict(self._table)

    def registered(self, now: float = 0.0) -> int:
        """How many different ranks are in."""
        return len(self._table) - (len(self._doubted) if now < self._doubt_end else 0)

    def missing(self, now: float = 0.0) -> list[Cell]:
        """The cells nobody has taken, in order; empty before the first rank tells the sizes."""
        phase = self.phase(now)
        if self._missing is None or self._missing[0] != phase:
            taken = self.trusted(now)
            cells = _grid(self._facts) if self._facts is not None else iter(())
            self._missing = phase, [cell for cell in cells if cell not in taken]
        return self._missing[1]

    def complete(self, now: float = 0.0) -> bool:
        """Whether every rank is in, so that anything may be told. All entries are in the grid."""
        return self._facts is not None and self.registered(now) == self._facts.ranks

    def topology(self, now: float = 0.0) -> Topology | None:
        """What the instance looks like; None while it is not complete."""
        if self._facts is None or not self.complete(now):
            return None
        facts = self._facts
        return Topology(
            attn_tp_size=facts.tp,
            attn_cp_size=facts.cp,
            dp_size=facts.dp,
            pp_size=facts.pp,
            page_size=facts.page_size,
            kv_cache_dtype=facts.kv_cache_dtype,
            follow_bootstrap_room=facts.load_balance_method == FOLLOW_ROOM,
            enable_dsa_cache_layer_split=facts.enable_dsa_cache_layer_split,
            dsv41_spec_layout=facts.dsv41_spec_layout,
            kv_layout=facts.kv_layout,
            decode_allocation_policy=facts.decode_allocation_policy,
            enable_kv_cache_sharding=facts.enable_kv_cache_sharding,
            prefill_http_port=facts.prefill_http_port,
        )

    def rank(self, dp: int, cp: int, tp: int, pp: int, now: float = 0.0) -> Entry | None:
        """Where one rank listens; None where it is not known or its address is in doubt."""
        cell = (dp, cp, tp, pp)
        entry = self._table.get(cell)
        if entry is None or entry.place != cell or not entry.trusted(now):
            return None
        return entry


def place_text(cell: Cell, facts: Facts | None = None) -> str:
    """`dp=0 tp=2`: a place without the axes that have one rank only."""
    names = ("dp", "cp", "tp", "pp")
    parts = zip(names, cell, strict=True)
    shown = [f"{n}={i}" for n, i in parts if facts is None or getattr(facts, n) > 1]
    return " ".join(shown) or f"tp={cell[2]}"


def _grid(facts: Facts) -> Iterator[Cell]:
    return product(range(facts.dp), range(facts.cp), range(facts.tp), range(facts.pp))

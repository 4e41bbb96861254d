"""Directory: which ranks of one prefill instance are in, where, and in which life?

Pure: time is an argument. api.py feeds it and answers from it. Open it to change when an instance
counts as complete, or what happens when a rank comes back under another address.

The gate opens when every cell of the grid is taken (SGLang counts calls; a repeat opens its gate
early). Sizes and other facts are those of the first rank; a later one that differs is kept, and
listed in `differing`, as the recorded transcripts demand.

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
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from kvplane.vocabulary import Generation

from .addresses import Address
from .errors import Inconsistent, LateLife
from .registration import Facts, Place, Registration
from .topology import FOLLOW_ROOM, Topology

LATCHED_LATER = ("kv_cache_dtype", "kv_layout", "prefill_http_port")  # null does not latch
REMEMBERED = 16  # past generations that are refused, and differences that are listed

Cell = tuple[int, int, int, int]  # dp, cp, tp, pp


@dataclass(slots=True)
class Entry:
    """One rank that is in."""

    address: Address
    raw_ip: str
    doubted_until: float = 0.0  # withheld before; 0 = never doubted

    def trusted(self, now: float) -> bool:
        """Whether its address may be handed out."""
        return now >= self.doubted_until


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a registration did, for logs and counters."""

    new_life: bool = False
    replaced: Address | None = None  # who was in the same place under another address
    differing: tuple[str, ...] = ()  # facts that are not the instance's; ignored


class Directory:
    """The rank table of one prefill instance."""

    def __init__(self, start: Generation, doubt_s: float = 60.0) -> None:
        """`start` names this process's life: generations made here never meet another's."""
        self._start, self._doubt_s = start, doubt_s
        self._lives = 0
        self._given: Generation | None = None  # what ranks of this table called their life
        self._past: deque[Generation] = deque(maxlen=REMEMBERED)
        self._facts: Facts | None = None
        self._table: dict[Place, Entry] = {}
        self._full: bool | None = None  # whether all cells are taken, once counted
        self._doubt_end = 0.0  # from then on no address is in doubt
        self.differing: deque[str] = deque(maxlen=REMEMBERED)
        self.version = 0  # moves with every accepted registration: answers may be cached by it

    @property
    def generation(self) -> Generation:
        """This life of the instance; equality only."""
        return self._given or Generation(f"{self._start}.{self._lives}")

    @property
    def facts(self) -> Facts | None:
        """What the instance is; None before its first rank."""
        return self._facts

    def register(
        self, new: Registration, now: float = 0.0, generation: Generation | None = None
    ) -> Accepted:
        """Take a rank in. Raises Inconsistent or LateLife, and nothing is changed then."""
        life = new.generation or generation
        if life is not None and life in self._past:
            raise LateLife(life, self.generation)
        known = self._table.get(new.place)
        replaced = known.address if known and known.address != new.address else None
        new_life = self._is_new_life(life, known, replaced, now)
        if self._facts is not None and not new_life:
            _refuse(self._facts, new.facts)
        if new_life:
            self._begin(life, new.facts, now)
        if life is not None:
            self._given = life
        differing = self._latch(new)
        self._table[new.place] = Entry(new.address, new.raw_ip)
        self.version += 1
        self._full = None
        return Accepted(new_life, replaced, differing)

    def _is_new_life(
        self, life: Generation | None, known: Entry | None, replaced: Address | None, now: float
    ) -> bool:
        if not self._table:
            return False
        if life is not None and self._given is not None:
            return life != self._given  # a rank that moved within its life is no new life
        if life is not None:
            return True  # the table was made by ranks that do not tell theirs
        return replaced is not None and known is not None and known.trusted(now)

    def _begin(self, life: Generation | None, facts: Facts, now: float) -> None:
        """A new life: addresses of the old one go, or are in doubt where we only guess."""
        if self._given is not None:
            self._past.append(self._given)
        self._given, self._lives = None, self._lives + 1
        self.differing.clear()
        if life is not None or (self._facts and _differences(self._facts, facts)):
            self._table, self._facts = {}, None
            return
        self._doubt_end = now + self._doubt_s
        for entry in self._table.values():
            entry.doubted_until = self._doubt_end

    def _latch(self, new: Registration) -> tuple[str, ...]:
        """First wins; a null is filled by the first who knows. What differs is remembered."""
        if self._facts is None:
            self._facts = new.facts
            return ()
        late = {
            name: getattr(new.facts, name)
            for name in LATCHED_LATER
            if getattr(self._facts, name) is None
        }
        self._facts = replace(self._facts, **late)
        differing = _differences(self._facts, new.facts)
        self.differing.extend(f"{place_text(new.place.cell)}: {what}" for what in differing)
        return differing

    def trusted(self, now: float = 0.0) -> dict[Place, Entry]:
        """The ranks whose addresses may be handed out."""
        return {place: entry for place, entry in self._table.items() if entry.trusted(now)}

    def table(self) -> dict[Place, Entry]:
        """All ranks, those in doubt too; for people."""
        return dict(self._table)

    def registered(self, now: float = 0.0) -> int:
        """How many different ranks are in."""
        return len(self.trusted(now))

    def missing(self, now: float = 0.0) -> list[Cell]:
        """The cells nobody has taken, in order; empty before the first rank tells the sizes."""
        return list(self._missing(now))

    def _missing(self, now: float) -> Iterator[Cell]:
        if self._facts is None:
            return
        taken = {place.cell for place in self.trusted(now)}
        for cell in _grid(self._facts):
            if cell not in taken:
                yield cell

    def complete(self, now: float = 0.0) -> bool:
        """Whether every rank is in, so that anything may be told."""
        if self._full is not None and now >= self._doubt_end:
            return self._full  # no cell has changed since it was counted, and none is in doubt
        full = self._facts is not None and next(self._missing(now), None) is None
        if now >= self._doubt_end:
            self._full = full
        return full

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
        entry = self._table.get(Place(dp, cp, tp, pp))
        return entry if entry is not None and entry.trusted(now) else None


def place_text(cell: Cell, facts: Facts | None = None) -> str:
    """`dp=0 tp=2`: a place without the axes that have one rank only."""
    names = ("dp", "cp", "tp", "pp")
    parts = zip(names, cell, strict=True)
    shown = [f"{n}={i}" for n, i in parts if facts is None or getattr(facts, n) > 1]
    return " ".join(shown) or f"tp={cell[2]}"


def _grid(facts: Facts) -> Iterator[Cell]:
    return product(range(facts.dp), range(facts.cp), range(facts.tp), range(facts.pp))


def _refuse(facts: Facts, new: Facts) -> None:
    """The two differences SGLang does not take, in its order and its words."""
    if facts.dsv41_spec_layout != new.dsv41_spec_layout:
        raise Inconsistent("DeepSeek-V4.1 DSpark PD layout differs across prefill ranks")
    if facts.decode_allocation_policy != new.decode_allocation_policy:
        raise Inconsistent("Inconsistent prefill allocation policies")


def _differences(facts: Facts, new: Facts) -> tuple[str, ...]:
    def differs(name: str) -> bool:
        here, there = getattr(facts, name), getattr(new, name)
        return bool(here != there) and not (name in LATCHED_LATER and None in (here, there))

    def shown(value: Any) -> str:
        return repr(value)[:80]

    return tuple(
        f"{f.name}: instance has {shown(getattr(facts, f.name))}, rank says "
        f"{shown(getattr(new, f.name))}"
        for f in fields(Facts)
        if differs(f.name)
    )

"""Directory: against a naive model, whatever registers, restarts, repeats, comes late or waits.

The instance is played as it is: lives one after the other, each with a page size and addresses of
its own. The model says which addresses may be told; it remembers registrations and counts nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit.directory import rank

from kvplane.bootstrap import Directory, Inconsistent, LateLife, Registration
from kvplane.bootstrap.lookups import Lookups, lookup
from kvplane.vocabulary import Generation

DOUBT_S = 60
Cell = tuple[int, int, int, int]


@dataclass
class Life:
    """One life of the played instance."""

    number: int
    page_size: int


@dataclass
class Told:
    """What the model remembers of a cell."""

    life: Life
    port: int
    doubted_until: float = 0.0


class Instance(RuleBasedStateMachine):
    """One prefill instance, its directory, and what may be told of it."""

    tells = False  # whether ranks tell their generation

    @initialize(dp=st.integers(1, 2), tp=st.integers(1, 3), pp=st.integers(1, 2))
    def begin(self, dp: int, tp: int, pp: int) -> None:
        self.sizes = (dp, 1, tp, pp)
        self.grid: list[Cell] = list(product(*map(range, self.sizes)))
        self.directory = Directory(Generation("s"), doubt_s=DOUBT_S)
        self.lookups = Lookups(self.directory)
        self.now = 0.0
        self.lives = [Life(0, 64)]
        self.table: dict[Cell, Told] = {}
        self.page_size: int | None = None
        self.begun = 0  # new lives the directory must have noticed
        self.generations = [self.directory.generation]
        self.owners: dict[Cell, int] = {}  # who registered last
        self.port = 1000
        self.ports: dict[tuple[int, Cell], int] = {}

    # What happens.

    @rule(wait=st.sampled_from([1, 20, 59, 60, 200]))
    def time_passes(self, wait: int) -> None:
        self.now += wait

    @rule(page_size=st.sampled_from([64, 64, 64, 32]))
    def restart(self, page_size: int) -> None:
        self.lives.append(Life(len(self.lives), page_size))

    @rule(index=st.integers(0, 11))
    def register(self, index: int) -> None:
        """A rank of the latest life; the second time it is a retry."""
        cell, life = self.grid[index % len(self.grid)], self.lives[-1]
        done = self.directory.register(self.parsed(cell, life), self.now)
        owner, port = self.owners.get(cell), self.port_of(cell, life)
        assert (done.replaced and done.replaced.port) == (owner if owner != port else None)
        self.owners[cell] = port
        assert done.new_life == self.take(cell, life)

    @precondition(lambda self: bool(self.table))
    @rule(index=st.integers(0, 11))
    def a_rank_that_has_not_moved_differs(self, index: int) -> None:
        cell = list(self.table)[index % len(self.table)]
        told = self.table[cell]
        self.refused(cell, told.life, page_size=96)

    @precondition(lambda self: bool(self.table))
    @rule()
    def a_rank_outside_the_grid_comes(self) -> None:
        cell = (0, 0, self.sizes[2], 0)
        life = self.newest if self.tells else self.lives[-1]
        self.refused(cell, life, attn_tp_size=self.sizes[2] + 1)

    @precondition(lambda self: self.tells and self.past)
    @rule(index=st.integers(0, 11), which=st.integers(0, 50))
    def a_late_rank_of_an_old_life_comes(self, index: int, which: int) -> None:
        cell, past = self.grid[index % len(self.grid)], self.past
        before = self.directory.version
        with pytest.raises(LateLife):
            self.directory.register(self.parsed(cell, past[which % len(past)]), self.now)
        assert self.directory.version == before

    # What may be told.

    @invariant()
    def only_what_the_model_knows_is_told(self) -> None:
        known = {c: t.port for c, t in self.table.items() if self.now >= t.doubted_until}
        trusted = self.directory.trusted(self.now)
        assert {c: e.address.port for c, e in trusted.items()} == known
        missing = [cell for cell in self.grid if cell not in known]
        assert self.directory.missing(self.now) == (missing if self.table else [])
        assert self.directory.registered(self.now) == len(known)
        assert self.directory.complete(self.now) == (bool(self.table) and not missing)
        for cell in self.grid:
            entry = self.directory.rank(*cell, self.now)
            assert (entry and entry.address.port) == known.get(cell)
            self.answered(cell, known, missing)

    def answered(self, cell: Cell, known: dict[Cell, int], missing: list[Cell]) -> None:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        asked = "&".join(f"{n}={i}" for n, i in zip(names, cell, strict=True)).encode()
        found = self.lookups.answer(asked, self.now)
        assert found == lookup(self.directory, asked, self.now), "from memory as from the table"
        if missing or not self.table:
            assert found.status == 503
            assert f"({len(known)} workers" in found.body.decode()
        else:
            assert json.loads(found.body)["rank_port"] == known[cell]

    @invariant()
    def a_generation_changes_exactly_when_a_life_begins(self) -> None:
        if self.directory.generation != self.generations[-1]:
            assert self.directory.generation not in self.generations
            self.generations.append(self.directory.generation)
        first = 1 if self.tells and self.table else 0  # the first told replaces our own
        assert len(self.generations) == 1 + self.begun + first

    @invariant()
    def told_lives_never_mix(self) -> None:
        told = {t.life.number for t in self.table.values() if self.now >= t.doubted_until}
        assert len(told) <= 1 or not self.tells

    # The model.

    def take(self, cell: Cell, life: Life) -> bool:
        """Remember a registration; whether the directory must see a new life in it."""
        known = self.table.get(cell)
        begins = self.begins(known, life)
        if begins:
            self.begun += 1
            if self.tells:
                self.table = {}
            elif life.page_size != self.page_size:
                kept = {c: t for c, t in self.table.items() if t.life.page_size == life.page_size}
                self.table = kept
            for told in self.table.values():
                told.doubted_until = self.now + DOUBT_S
        if not self.table or (begins and (self.tells or life.page_size != self.page_size)):
            self.page_size = life.page_size
        self.table[cell] = Told(life, self.port_of(cell, life))
        return begins

    def begins(self, known: Told | None, life: Life) -> bool:
        if not self.table:
            return False
        if self.tells:
            return life is not self.newest
        if known is None or known.life is life:
            return False
        return self.now >= known.doubted_until or life.page_size != self.page_size

    @property
    def newest(self) -> Life:
        """Of the lives that have registered."""
        return max((told.life for told in self.table.values()), key=lambda life: life.number)

    @property
    def past(self) -> list[Life]:
        """Lives that registered and were replaced."""
        if not self.table:
            return []
        seen = {number for number, _ in self.ports}
        return [life for life in self.lives if life.number in seen - {self.newest.number}]

    def port_of(self, cell: Cell, life: Life) -> int:
        """No two ranks of any two lives share one."""
        self.port += (life.number, cell) not in self.ports
        return self.ports.setdefault((life.number, cell), self.port)

    def parsed(self, cell: Cell, life: Life, **changes: Any) -> Registration:
        members: dict[str, Any] = {
            "attn_dp_size": self.sizes[0], "attn_dp_rank": cell[0],
            "attn_tp_size": self.sizes[2], "attn_tp_rank": cell[2],
            "pp_size": self.sizes[3], "pp_rank": cell[3], "page_size": life.page_size,
            "rank_port": self.port_of(cell, life),
        }  # fmt: skip
        told = {"generation": f"life-{life.number}"} if self.tells else {}
        return Registration.parse(rank(**(members | told | changes)))

    def refused(self, cell: Cell, life: Life, **changes: Any) -> None:
        before = (self.directory.version, self.directory.table(), self.directory.facts)
        with pytest.raises(Inconsistent) as caught:
            self.directory.register(self.parsed(cell, life, **changes), self.now)
        for member in changes:
            assert f"{member}: instance has" in str(caught.value)
        assert (self.directory.version, self.directory.table(), self.directory.facts) == before


class TellingInstance(Instance):
    """The same where every rank tells its generation."""

    tells = True


TestInstance = Instance.TestCase
TestTellingInstance = TellingInstance.TestCase
TestInstance.settings = TestTellingInstance.settings = settings(
    max_examples=40, stateful_step_count=40
)

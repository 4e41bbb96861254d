"""The view says exactly what a naive model says, whatever engines do, in any order."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kit.groups import naive_usable
from kit.memory import bytes_in
from xxhash import xxh3_64_intdigest

from kvplane.index import (
    Note,
    Row,
    Snapshot,
    Value,
    View,
    WorkerState,
    families,
    forest,
    group_key,
    places,
    rank,
    rule_key,
)
from kvplane.index import view as view_module
from kvplane.index.loading import read
from kvplane.index.stores.rows import encode
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Cursor,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Namespace,
    Pod,
    PrefixChain,
    Removed,
    Stored,
    Tier,
    Worker,
)

WORKERS = [Worker(Pod(name), rank) for name, rank in (("a", 0), ("a", 1), ("b", 0), ("c", 0))]
TIERS = [Tier.GPU, Tier.CPU, Tier.DISK]
SPACE = Namespace("m", 16)
Path = tuple[int, ...]  # which child is taken at each block: names a block and all before it

paths = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
workers = st.sampled_from(WORKERS)
groups = st.sampled_from(
    [
        Group(1, GroupKind.WINDOW, 33),
        Group(1, GroupKind.WINDOW, 40),  # told another rule later
        Group(2, GroupKind.STATE),
        Group(2, GroupKind.FULL, 0, 32),
        Group(3, GroupKind.CHUNK, 64),
    ]
)
tiers = st.sampled_from(TIERS)


def block(path: Path) -> BlockHash:
    """A number of 64 bits that names the path."""
    return BlockHash(xxh3_64_intdigest(bytes(path)))


def blocks_of(path: Path) -> tuple[BlockHash, ...]:
    return tuple(block(path[:end]) for end in range(1, len(path) + 1))


class Naive:
    """One set of blocks per worker and tier; nothing shared, nothing clever."""

    def __init__(self) -> None:
        self.held: dict[Worker, dict[Tier, set[BlockHash]]] = {}
        self.groups: dict[Worker, dict[int, tuple[Group, dict[Tier, set[BlockHash]]]]] = {}

    def void(self, worker: Worker, over: bool) -> None:
        """`over`: the life ended; else the groups are still there, empty."""
        self.held.pop(worker, None)
        for group, _ in list(self.groups.get(worker, {}).values()):
            self.groups[worker][group.number] = group, {tier: set() for tier in TIERS}
        if over:
            self.groups.pop(worker, None)

    def of(self, worker: Worker) -> dict[Tier, set[BlockHash]]:
        return self.held.setdefault(worker, {tier: set() for tier in TIERS})

    def depth(self, worker: Worker, asked: tuple[BlockHash, ...]) -> tuple[int, dict[Tier, int]]:
        tiers: dict[Tier, int] = {}
        for at, one in enumerate(asked):
            best = next((tier for tier in TIERS if one in self.of(worker)[tier]), None)
            if best is None:
                asked = asked[:at]
                break
        depth = self.usable(worker, asked)
        for one in asked[:depth]:
            best = next(tier for tier in TIERS if one in self.of(worker)[tier])
            tiers[best] = tiers.get(best, 0) + 1
        return depth, tiers

    def usable(self, worker: Worker, asked: tuple[BlockHash, ...]) -> int:
        groups = []
        for group, held in self.groups.get(worker, {}).values():
            there = set().union(*held.values())
            groups.append((group, {at for at, one in enumerate(asked) if one in there}))
        return naive_usable(len(asked), groups)


class Machine(RuleBasedStateMachine):
    """Stores and removals anywhere, clears, new lives, late facts, sweeps."""

    @initialize()
    def begin(self) -> None:
        self.view, self.naive = View(), Naive()
        self.epochs = dict.fromkeys(WORKERS, Epoch(1))
        self.asked: set[Path] = set()
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def tell(self, change: Change) -> None:
        self.view.apply(change)

    def learn(self, path: Path) -> None:
        self.asked.add(path)
        self.parents.update(zip(blocks_of(path), (None, *blocks_of(path)), strict=False))

    @rule(worker=workers, tier=tiers, path=paths, skip=st.integers(0, 8))
    def store(self, worker: Worker, tier: Tier, path: Path, skip: int) -> None:
        self.learn(path)
        skip = min(skip, len(path) - 1)  # an orphan where nobody told the blocks before
        blocks = blocks_of(path)[skip:]
        parent = block(path[:skip]) if skip else None
        self.tell(Stored(worker, self.epochs[worker], tier, parent, blocks, 16))
        self.naive.of(worker)[tier].update(blocks)

    @rule(worker=workers, path=paths)
    def store_prompt(self, worker: Worker, path: Path) -> None:
        self.store(worker, Tier.GPU, path, 0)

    @rule(worker=workers, tier=tiers, data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def store_what_others_hold_and_go_on(
        self, worker: Worker, tier: Tier, data: st.DataObject, more: list[int]
    ) -> None:
        path = data.draw(st.sampled_from(sorted(self.asked) or [(0,)]))
        keep = data.draw(st.integers(1, len(path)))
        self.store(worker, tier, (*path[:keep], *more), 0)

    @rule(worker=workers, tier=tiers, data=st.data())
    def remove(self, worker: Worker, tier: Tier, data: st.DataObject) -> None:
        held = sorted(self.naive.of(worker)[tier]) or [block((0,))]
        gone = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=5))
        self.tell(Removed(worker, self.epochs[worker], tier, tuple(gone)))
        self.naive.of(worker)[tier].difference_update(gone)

    @rule(worker=workers, data=st.data())
    def punch_a_hole(self, worker: Worker, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.asked) or [(0,)]))
        at = data.draw(st.integers(0, len(path) - 1))
        for tier in TIERS:
            self.tell(Removed(worker, self.epochs[worker], tier, blocks_of(path)[at : at + 1]))
            self.naive.of(worker)[tier].discard(blocks_of(path)[at])

    @rule(worker=workers, path=paths, keep=st.integers(0, 5))
    def evict_tail_first(self, worker: Worker, path: Path, keep: int) -> None:
        gone = blocks_of(path)[keep:][::-1]
        self.tell(Removed(worker, self.epochs[worker], Tier.GPU, gone))
        self.naive.of(worker)[Tier.GPU].difference_update(gone)

    @rule(worker=workers, tier=tiers, path=paths, data=st.data())
    def evict_in_some_order(
        self, worker: Worker, tier: Tier, path: Path, data: st.DataObject
    ) -> None:
        """Rows forwards and backwards, with some left out and some out of place."""
        blocks = list(blocks_of(path))
        gone = data.draw(st.permutations(blocks)) if data.draw(st.booleans()) else blocks
        at, to = (data.draw(st.integers(0, len(gone) - 1)) for _ in range(2))
        gone[at], gone[to] = gone[to], gone[at]
        gone = gone[:: data.draw(st.sampled_from((1, -1)))] + gone[at : at + 1]  # one named twice
        self.tell(Removed(worker, self.epochs[worker], tier, tuple(gone)))
        self.naive.of(worker)[tier].difference_update(gone)

    @rule(worker=workers, reason=st.sampled_from(ClearReason))
    def clear(self, worker: Worker, reason: ClearReason) -> None:
        if reason is ClearReason.RESTART:
            self.epochs[worker] = Epoch(self.epochs[worker] + 1)
        self.tell(Cleared(worker, self.epochs[worker], reason))
        self.naive.void(worker, reason in (ClearReason.RESTART, ClearReason.GONE))

    @rule(worker=workers, tier=tiers)
    def clear_tier(self, worker: Worker, tier: Tier) -> None:
        self.tell(Cleared(worker, self.epochs[worker], ClearReason.ENGINE, tier))
        self.naive.of(worker)[tier].clear()
        for _, held in self.naive.groups.get(worker, {}).values():
            held[tier].clear()

    @rule(worker=workers, path=paths)
    def new_life_without_a_word(self, worker: Worker, path: Path) -> None:
        self.epochs[worker] = Epoch(self.epochs[worker] + 1)
        self.naive.void(worker, over=True)
        self.store(worker, Tier.GPU, path, 0)
        old = Epoch(self.epochs[worker] - 1)
        self.tell(Stored(worker, old, Tier.CPU, None, blocks_of((1, 1, 1)), 16))
        self.tell(Removed(worker, old, Tier.GPU, blocks_of(path)))

    @rule(chance=st.randoms(use_true_random=False))
    def begin_again_from_a_snapshot(self, chance: Random) -> None:
        self.view = View()
        self.view.load(self.snapshot(WORKERS, chance))

    @rule(some=st.sets(workers), chance=st.randoms(use_true_random=False), late=workers)
    def draw_some_workers_anew(self, some: set[Worker], chance: Random, late: Worker) -> None:
        draft = self.view.draft()
        for state in self.snapshot(some, chance).workers:
            sheet = read(state.table)
            assert not list(draft.build(state, sheet, sheet.plan()))
        self.depths_are_those_of_the_model()  # a draft answers for nobody
        self.counts_and_holders_are_those_of_the_model()
        if late in some:  # told while the draft is made: to the draft alone
            self.view, draft = draft, self.view
            self.store(late, Tier.CPU, (0, 1, 0), 0)
            self.view, draft = draft, self.view
        self.view.adopt(draft, some)

    @rule(some=st.sets(workers), chance=st.randoms(use_true_random=False))
    def drop_a_draft(self, some: set[Worker], chance: Random) -> None:
        draft = self.view.draft()
        for state in self.snapshot(some, chance).workers:
            sheet = read(state.table)
            assert not list(draft.build(state, sheet, sheet.plan()))
        draft.drop()

    def snapshot(self, some: Collection[Worker], chance: Random) -> Snapshot:
        """What a store would say: rows under names that mean nothing, in any order."""
        return Snapshot(
            Cursor("a"), tuple(self.state(worker, chance) for worker in some), Cursor("a")
        )

    def state(self, worker: Worker, chance: Random) -> WorkerState:
        table: dict[bytes, Value] = {b"!mark": Note(b"x"), b"?0": Note(bytes(19))}
        for key, row in self.rows(self.naive.of(worker)):
            table[key] = row
            if chance.random() < 0.1:
                table[key + b"again"] = row  # one block under two engine keys
        for group, held in self.naive.groups.get(worker, {}).values():
            table[rule_key(group.number)] = group
            table.update((group_key(group.number, key), row) for key, row in self.rows(held))
        keys = sorted(table)
        chance.shuffle(keys)
        encoded = {key: encode(table[key]) for key in keys}
        return WorkerState(worker, self.epochs[worker], 3, (), encoded)

    def rows(self, held: dict[Tier, set[BlockHash]]) -> Iterator[tuple[bytes, Row]]:
        for one in self.parents:
            copies = [int(one in held[tier]) for tier in TIERS]
            if any(copies) or one % 3 == 0:  # a name alone, nothing held
                yield b"u%d" % one, Row(one, self.parents[one], (*copies, 0), 16)

    @rule(most=st.integers(1, 5))
    def sweep(self, most: int) -> None:
        self.view.sweep(most)

    @invariant()
    def depths_are_those_of_the_model(self) -> None:
        for path in self.asked:
            asked = blocks_of(path)
            for held in rank(self.view, PrefixChain(SPACE, asked), WORKERS):
                depth, tiers = self.naive.depth(held.worker, asked)
                assert (held.depth_blocks, dict(held.tiers)) == (depth, tiers), held
            depths = {worker: self.naive.depth(worker, asked)[0] for worker in WORKERS}
            reached = {worker: depth for worker, depth in depths.items() if depth}
            assert self.view.prefixes(asked) == reached
            told = self.view.together(asked)
            assert {one: depth for some, depth in told for one in some} == reached

    @invariant()
    def counts_and_holders_are_those_of_the_model(self) -> None:
        for worker in WORKERS:
            facts = self.view.facts(worker)
            counts = facts.counts[:3] if facts else [0, 0, 0]
            assert counts == [len(self.naive.of(worker)[tier]) for tier in TIERS]
            rebuilt: dict[Tier, list[BlockHash]] = {tier: [] for tier in TIERS}
            for stored in self.view.held(worker):
                rebuilt[stored.tier].extend(stored.blocks)
            for tier, blocks in rebuilt.items():
                assert sorted(blocks) == sorted(self.naive.of(worker)[tier])
        for one in blocks_of(next(iter(self.asked), ())):
            for worker in WORKERS:
                mine = tuple(tier for tier in TIERS if one in self.naive.of(worker)[tier])
                assert self.view.holders(one).get(worker, ()) == mine

    @invariant()
    def what_nobody_holds_is_given_back(self) -> None:
        while self.view.sweep():
            pass
        held = {b for w in WORKERS for tier in TIERS for b in self.naive.of(w)[tier]}
        size = self.view.size()
        assert len(held) <= size.blocks <= max(4 * len(held), len(held) + 4)
        assert size.runs <= size.blocks

    @invariant()
    def whose_parent_is_known_begins_behind_an_end(self) -> None:
        ends, children = self.view._forest._ends, Counter[int]()
        for first, run in ends.heads.items():
            assert run.blocks[0] == first and ends.tails[run.blocks[-1]] is run
            if run.parent is not None:
                children[run.parent] += 1
        assert len(ends.tails) == len(ends.heads)
        known = {block for run in ends.heads.values() for block in run.blocks}
        assert len(known) == sum(len(run.blocks) for run in ends.heads.values())
        assert ends.awaited == {one: n for one, n in children.items() if one not in known}
        for last, run in ends.tails.items():
            assert run.children == children[last]
            assert children.keys().isdisjoint(run.blocks[:-1])


class SmallRuns(Machine):
    """The same with runs of at most three blocks, so that every border is met."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(forest, "MOST_BLOCKS", 3)
        self.patch.setattr(forest, "MISSED", 2)
        self.patch.setattr(families, "SPARE", 4)  # places are made anew all the time
        self.patch.setattr(places, "FEW", 2)  # and sorted
        self.patch.setattr(places, "MOST", 8)

    def teardown(self) -> None:
        self.patch.undo()


class Unswept(SmallRuns):
    """The same while void bits stay about and go one run at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(view_module, "_SWEEP_RUNS", 1)

    def what_nobody_holds_is_given_back(self) -> None:
        pass


class Hybrid(SmallRuns):
    """The same with further groups, which keep what they like of what the counted one holds."""

    @rule(worker=workers, group=groups, tier=tiers, path=paths, keep=st.integers(0, 511))
    def group_stores(self, worker: Worker, group: Group, tier: Tier, path: Path, keep: int) -> None:
        self.learn(path)
        kept = tuple(b for at, b in enumerate(blocks_of(path)) if keep >> at & 1)
        self.tell(Stored(worker, self.epochs[worker], tier, None, kept, 16, group))
        fresh = group, {tier: set[BlockHash]() for tier in TIERS}
        mine = self.naive.groups.setdefault(worker, {})
        mine[group.number] = group, mine.get(group.number, fresh)[1]
        mine[group.number][1][tier].update(kept)

    @rule(worker=workers, number=st.integers(1, 3), tier=tiers, path=paths, keep=st.integers(0, 8))
    def group_removes(self, worker: Worker, number: int, tier: Tier, path: Path, keep: int) -> None:
        gone = blocks_of(path)[keep:]
        self.tell(Removed(worker, self.epochs[worker], tier, gone, number))
        if number in self.naive.groups.get(worker, {}):
            self.naive.groups[worker][number][1][tier].difference_update(gone)

    @invariant()
    def groups_are_those_of_the_model(self) -> None:
        for worker in WORKERS:
            facts = self.view.facts(worker)
            held = (
                {number: further.held for number, further in facts.groups.items()} if facts else {}
            )
            model = self.naive.groups.get(worker, {})
            assert held == {
                number: [*(of[tier] for tier in TIERS), set()] for number, (_, of) in model.items()
            }


for machine in (Machine, SmallRuns, Unswept, Hybrid):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLongRuns: Any = Machine.TestCase
TestSmallRuns: Any = SmallRuns.TestCase
TestUnswept: Any = Unswept.TestCase
TestHybrid: Any = Hybrid.TestCase

A, B, C = WORKERS[0], WORKERS[2], WORKERS[3]
FIVE = blocks_of((0, 0, 0, 0, 0))
EXACT, PARTIAL, DARK = Knowledge.EXACT, Knowledge.PARTIAL, Knowledge.DARK


def stored(worker: Worker, blocks: tuple[BlockHash, ...], epoch: int = 1) -> Stored:
    return Stored(worker, Epoch(epoch), Tier.GPU, None, blocks, 16)


def depth(view: View, worker: Worker, blocks: tuple[BlockHash, ...] = FIVE) -> int:
    return rank(view, PrefixChain(SPACE, blocks), [worker])[0].depth_blocks


def test_a_cleared_worker_holds_nothing_at_once_and_another_is_untouched() -> None:
    view = View()
    for worker in (A, B):
        view.apply(stored(worker, FIVE))
    view.apply(Cleared(A, Epoch(1), ClearReason.GAP))
    assert (depth(view, A), depth(view, B)) == (0, 5)
    facts = view.facts(A)
    assert facts is not None and facts.gaps == 1 and facts.counts == [0, 0, 0, 0]


def test_ordinals_are_reused_only_after_a_whole_sweep() -> None:
    view = View()
    for life in range(1, 400):
        view.apply(stored(A, FIVE, life))
        view.apply(stored(B, FIVE, life))
    while view.sweep():
        pass
    assert view._forest._next < 8
    assert view.size().holdings == 10
    assert (depth(view, A), depth(view, B)) == (5, 5)


@pytest.mark.parametrize("left", [slice(2, 5), slice(0, 3)])
def test_what_is_left_of_a_run_tells_the_block_before_it(left: slice) -> None:
    view = View()
    view.apply(stored(A, FIVE))
    gone = tuple(block for block in FIVE if block not in FIVE[left])
    view.apply(Removed(A, Epoch(1), Tier.GPU, gone))
    (told,) = view.held(A)
    assert told.blocks == FIVE[left] and told.parent == (FIVE[1] if left.start else None)


def test_a_shared_system_prompt_is_one_run_that_all_hold_whole() -> None:
    view = View()
    system = blocks_of((0,) * 40)
    view.apply(stored(A, blocks_of((0,) * 40 + (1,) * 40)))
    view.apply(stored(B, blocks_of((0,) * 40 + (2,) * 40)))
    view.apply(stored(C, system))
    _, path = view._forest.depths(system, view._forest.alive)
    assert len(path) == 1 and not path[0][0].partial
    assert view.size().runs == 3


def test_a_gone_worker_is_forgotten_and_may_begin_again_at_epoch_one() -> None:
    view = View()
    view.apply(stored(A, FIVE, 7))
    view.apply(Cleared(A, Epoch(7), ClearReason.GONE))
    assert view.workers() == () and view.holders(FIVE[0]) == {}
    view.apply(stored(A, FIVE[:2]))
    assert depth(view, A) == 2 and view.epoch(A) == 1


def test_knowledge_and_position_belong_to_one_life() -> None:
    view = View()
    view.apply(Known(A, Epoch(1), Knowledge.EXACT, "live", 5.0))
    view.note(A, Epoch(1), 41, 6.0)
    view.note(A, Epoch(9), 99, 7.0)
    view.note(A, Epoch(1), 40, 6.0)  # told again, as after a snapshot
    facts = view.facts(A)
    assert facts is not None and (facts.last, facts.heard) == (41, 6.0)
    view.apply(Cleared(A, Epoch(2), ClearReason.RESTART))
    assert view.known(A) is None and facts.last is None and facts.epoch == 2


def test_eight_hundred_blocks_in_one_event_are_found_again() -> None:
    view, long = View(), blocks_of((0,) * 800)
    view.apply(stored(A, long))
    assert depth(view, A, long) == 800 and view.size().runs == 2
    view.apply(Removed(A, Epoch(1), Tier.GPU, (long[600],)))
    assert depth(view, A, long) == 600
    view.apply(Stored(A, Epoch(1), Tier.GPU, long[599], (long[600],), 16))
    assert depth(view, A, long) == 800


def says(by: str, state: Knowledge, since: float = 1.0, reason: str = "") -> Known:
    return Known(A, Epoch(1), state, reason or by, since, by)


def told(living: frozenset[str] | None, *known: Known) -> tuple[Knowledge, str]:
    view = View()
    view.living = living
    for one in known:
        view.apply(one)
    found = view.known(A)
    assert found is not None
    return found.state, found.reason


@pytest.mark.parametrize(
    ("living", "expected"),
    [
        (None, (EXACT, "b")),  # nobody told yet who lives: all are believed
        ("abcd", (EXACT, "b")),  # of equals the newest
        ("acd", (EXACT, "a")),
        ("cd", (PARTIAL, "c")),
        ("d", (DARK, "d")),
        ("xy", (DARK, "no living ingest follows it: the last one was d")),
        ("", (DARK, "no living ingest follows it: the last one was d")),
    ],
)
def test_the_best_word_of_a_living_ingest_counts(
    living: str | None, expected: tuple[Knowledge, str]
) -> None:
    words = (says("a", EXACT), says("b", EXACT, 2.0), says("c", PARTIAL, 3.0), says("d", DARK, 4.0))
    lives = None if living is None else frozenset(living)
    assert told(lives, *words) == told(lives, *words[::-1]) == expected


def test_an_ingest_takes_back_what_it_said() -> None:
    assert told(None, says("a", EXACT), says("a", DARK, 2.0, "silent"))[1] == "silent"
    assert told(None, says("a", DARK, 2.0), says("b", PARTIAL, 1.0), says("a", EXACT))[0] == EXACT


def test_words_of_ingests_that_came_and_went_do_not_pile_up_and_the_living_stay() -> None:
    view = View()
    view.living = frozenset({"a", "b"})
    for by in ("a", "b", *map(str, range(1000)), "a"):
        view.apply(says(by, DARK))
    facts = view.facts(A)
    assert facts is not None and len(facts.known) < 50 and {"a", "b"} <= facts.known.keys()


def test_who_is_cut_off_is_not_exact_and_nobody_else_is_touched() -> None:
    view = View()
    for worker in (A, B):
        view.apply(Known(worker, Epoch(1), EXACT, "live", 1.0, "a"))
    view.cut_off = frozenset({A})
    known = view.known(A)
    assert known is not None and known.state is PARTIAL and "does not answer" in known.reason
    assert view.known(B) == Known(B, Epoch(1), EXACT, "live", 1.0, "a")


WINDOW = Group(1, GroupKind.WINDOW, 33)  # the last two blocks


def of_group(blocks: tuple[BlockHash, ...], tier: Tier = Tier.GPU, group: Group = WINDOW) -> Stored:
    return Stored(A, Epoch(1), tier, None, blocks, 16, group)


def test_a_further_group_caps_depth_and_is_counted_nowhere() -> None:
    view = View()
    view.apply(stored(A, FIVE))
    view.apply(of_group(()))  # only told to be there
    assert depth(view, A) == 0
    view.apply(of_group(FIVE[1:3]))
    assert depth(view, A) == 3
    view.apply(of_group(FIVE[4:], Tier.CPU))
    view.apply(of_group(FIVE[3:4], Tier.DISK))
    assert depth(view, A) == 5
    view.apply(Removed(A, Epoch(1), Tier.DISK, FIVE[3:4], 1))
    view.apply(Removed(A, Epoch(1), Tier.GPU, FIVE[4:], 1))  # it lies on the CPU
    assert depth(view, A) == 3
    facts, size = view.facts(A), view.size()
    assert facts is not None and facts.counts == [5, 0, 0, 0]
    assert (size.blocks, size.holdings, size.runs) == (5, 5, 1)
    assert view.holders(FIVE[4]) == {A: (Tier.GPU,)}
    view.apply(of_group(blocks_of((2, 2))))  # the counted group holds none of it
    assert view.holders(blocks_of((2, 2))[0]) == {} and view.size().blocks == 5
    assert sum(len(one.blocks) for one in view.held(A)) == 5


def test_groups_of_other_sizes_see_every_kth_block_and_odd_ones_cap_nothing() -> None:
    view = View()
    view.apply(stored(A, FIVE))
    view.apply(of_group(FIVE[1:2], group=Group(2, GroupKind.FULL, 0, 32)))
    assert depth(view, A) == 2
    view.apply(of_group(FIVE[3:4], group=Group(2, GroupKind.FULL, 0, 32)))
    assert depth(view, A) == 4
    view.apply(of_group((), group=Group(3, GroupKind.FULL, 0, 24)))
    assert depth(view, A) == 4


def test_what_a_clear_voids_of_further_groups() -> None:
    view = View()

    def fill() -> None:
        view.apply(stored(A, FIVE))
        view.apply(of_group(FIVE[3:]))
        view.apply(of_group(FIVE[3:4], Tier.CPU))
        assert depth(view, A) == 5

    fill()
    view.apply(Cleared(A, Epoch(1), ClearReason.ENGINE, Tier.GPU))
    view.apply(stored(A, FIVE))
    assert depth(view, A) == 0, "the window's last block lay on the GPU alone"
    fill()
    view.apply(Cleared(A, Epoch(1), ClearReason.GAP))
    view.apply(stored(A, FIVE))
    assert depth(view, A) == 0, "the same life: its groups are still there, and empty"
    view.apply(Cleared(A, Epoch(2), ClearReason.RESTART))
    view.apply(stored(A, FIVE, 2))
    assert depth(view, A) == 5, "another life may have none"


def test_a_restarted_worker_of_the_same_name_holds_nothing_until_it_stores() -> None:
    """FR-IX-05: the name, the address and the pod are the same; the cache is not."""
    view, twenty = View(), blocks_of((0,) * 20)
    view.apply(stored(A, twenty))
    view.apply(Cleared(A, Epoch(2), ClearReason.RESTART))
    assert depth(view, A, twenty) == 0
    view.apply(stored(A, twenty[4:]))  # a late word of the old life
    assert depth(view, A, twenty) == 0 and view.size().blocks == 0
    view.apply(stored(A, twenty[:3], 2))
    assert depth(view, A, twenty) == 3 and view.epoch(A) == 2


ROUNDS = {
    "removed": lambda view, mine: view.apply(Removed(A, Epoch(1), Tier.GPU, mine)),
    "evicted backwards": lambda view, mine: view.apply(Removed(A, Epoch(1), Tier.GPU, mine[::-1])),
    "cleared": lambda view, mine: view.apply(Cleared(A, Epoch(1), ClearReason.ENGINE)),
    "tier cleared": lambda view, mine: view.apply(
        Cleared(A, Epoch(1), ClearReason.ENGINE, Tier.GPU)
    ),
    "gone": lambda view, mine: view.apply(Cleared(A, Epoch(1), ClearReason.GONE)),
}


@pytest.mark.parametrize("end", ROUNDS.values(), ids=list(ROUNDS))
def test_memory_is_flat_over_rounds_and_an_empty_view_is_empty(
    end: Callable[[View, tuple[BlockHash, ...]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-IX-10, as far as the view: it holds what workers hold, and nothing of the past."""
    monkeypatch.setattr(families, "SPARE", 0)  # else so many old words are let be
    view, used = View(), []
    tracemalloc.start()
    try:
        for turn in range(12):
            mine = tuple(
                BlockHash(xxh3_64_intdigest(bytes(4), turn * 4000 + n)) for n in range(4000)
            )
            for at in range(0, 4000, 50):
                parent = mine[at - 1] if at % 1000 else None
                view.apply(Stored(A, Epoch(1), Tier.GPU, parent, mine[at : at + 50], 16))
            view.apply(of_group(mine[:50]))
            end(view, mine)
            view.apply(Removed(A, Epoch(1), Tier.GPU, mine, 1))
            while view.sweep():
                pass
            size, forest = view.size(), view._forest
            assert (size.blocks, size.holdings, size.runs, forest.blocks) == (0, 0, 0, 0)
            assert not forest.heads and not forest.tails and not len(forest._families)
            assert not forest._pass and forest._next <= 2
            del mine
            used.append(bytes_in("*/index/*.py"))
    finally:
        tracemalloc.stop()
    assert max(used[6:]) - min(used[3:]) < 50_000, used  # a round is a quarter of a megabyte


@pytest.mark.parametrize("seed", range(5))
def test_what_contradicts_itself_breaks_nothing(seed: int) -> None:
    """Blocks of two parents, of none, twice in a row: no engine's tokens can mean that."""
    view, chance = View(), Random(seed)
    few = [BlockHash(n) for n in (*range(12), *range(2**64 - 4, 2**64))]
    for _ in range(1500):
        worker, tier = chance.choice(WORKERS), chance.choice(TIERS)
        some = tuple(chance.choices(few, k=chance.randint(1, 7)))
        what = chance.random()
        if what < 0.55:
            parent = chance.choice((None, *few))
            view.apply(Stored(worker, Epoch(1), tier, parent, some, 16))
        elif what < 0.95:
            view.apply(Removed(worker, Epoch(1), tier, some))
        else:
            view.apply(Cleared(worker, Epoch(1), ClearReason.ENGINE, chance.choice((None, tier))))
        assert all(0 <= depth <= len(some) for depth in view.prefixes(some).values())
        assert view.holders(some[0]) is not None and view.size().blocks >= 0
    view.drop()
    while view.sweep():
        pass
    view.apply(stored(A, FIVE))
    assert depth(view, A) == 5

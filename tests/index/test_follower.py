"""The follower's view equals the store: from a snapshot, by the tail, over outages and trims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence

import pytest
from kit.clock import FakeClock
from kit.ports import free_port
from kit.redis import binary, server
from kit.shards import Shards
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.index import (
    Batch,
    Entry,
    Follower,
    IndexMetrics,
    IndexSettings,
    MemoryStore,
    RedisStore,
    Row,
    Snapshot,
    Store,
    View,
    WorkerState,
    rank,
)
from kvplane.index.answers import trust
from kvplane.index.forest import Forest
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    ClearReason,
    Cursor,
    Epoch,
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

A, ONE = Worker(Pod("a")), Epoch(1)


async def put(store: Store, number: int, epoch: Epoch = ONE) -> None:
    blocks = (BlockHash(number),)
    parent = BlockHash(number - 1) if number else None
    change = Stored(A, epoch, Tier.GPU, parent, blocks, 16)
    rows = {b"%d" % number: Row(blocks[0], parent, (1, 0, 0, 0), 16)}
    await store.apply(Batch(A, epoch, number, number, (change,), rows))


def count(view: View) -> int:
    facts = view.facts(A)
    return facts.counts[0] if facts else -1


@pytest.fixture
async def store(clock: FakeClock) -> AsyncIterator[MemoryStore]:
    made = MemoryStore(clock, IndexSettings(stream_entries=20))
    yield made
    await made.close()


async def test_a_view_begins_with_the_snapshot_and_goes_on_with_the_tail(
    store: MemoryStore, clock: FakeClock
) -> None:
    await store.begin_life(A, None)
    await store.known(Known(A, ONE, Knowledge.EXACT, "live", 1.0))
    for number in range(40):  # more than the stream keeps
        await put(store, number)
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    follower = Follower(store, view, clock, metrics)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        assert count(view) == 40 and view.known(A) is not None
        await put(store, 40)
        await until(lambda: count(view) == 41)
        facts = view.facts(A)
        assert facts is not None and facts.last == 40
        assert follower.cursor == await store.head()
        await store.begin_life(A, ONE)
        await until(lambda: view.epoch(A) == 2)
        assert count(view) == 0
    value = metrics.registry.get_sample_value
    assert value("kvplane_index_entries_total") == 2
    assert value("kvplane_index_blocks", {"worker": "a", "tier": "gpu"}) == 0
    assert value("kvplane_index_lag_seconds") == 0


async def test_a_follower_that_fell_behind_begins_again_from_a_snapshot(
    store: MemoryStore, clock: FakeClock
) -> None:
    await store.begin_life(A, None)
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    follower = Follower(store, view, clock, metrics)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        for number in range(100):  # none of these awaits lets the follower run
            await put(store, number)

        def caught_up() -> bool:
            clock.advance(1)
            return count(view) == 100

        await until(caught_up)
    errors = metrics.registry.get_sample_value
    assert errors("kvplane_index_store_errors_total", {"kind": "cursor_gone"}) == 1


async def test_lag_is_the_age_of_the_last_entry_until_the_stream_is_idle(
    store: MemoryStore, clock: FakeClock
) -> None:
    await store.begin_life(A, None)
    view = View()
    follower = Follower(store, view, clock)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        await put(store, 0)
        clock.advance(0.25)
        await until(lambda: count(view) == 1)
        assert follower.lag_ms() == 250
        clock.advance(1)
        assert follower.lag_ms() == 0 and follower.down_s() == 0


async def test_an_outage_keeps_the_view_and_ends_without_a_new_snapshot(tmp_path: object) -> None:
    port, view = free_port(), View()
    disk = ("--dir", str(tmp_path), "--appendonly", "yes", "--appendfsync", "always")
    settings = IndexSettings(block_ms=50, command_timeout_s=1.0)
    metrics = IndexMetrics(CollectorRegistry())
    store = RedisStore(f"redis://127.0.0.1:{port}/0", settings=settings)
    follower = Follower(store, view, SystemClock(), metrics)
    try:
        with server(binary(), *disk, port=port):
            await store.begin_life(A, None)
            await put(store, 0)
            await follower.start()
            await asyncio.wait_for(follower.ready.wait(), 5)
        await until(lambda: follower.down_s() > 0)
        assert count(view) == 1 and follower.lag_ms() > 0
        with server(binary(), *disk, port=port):
            await until(lambda: follower.down_s() == 0)
            await put(store, 1)
            await until(lambda: count(view) == 2)
        assert metrics.registry.get_sample_value("kvplane_index_snapshots_total") == 1
    finally:
        await follower.stop()
        await store.close()


# -- several shards ------------------------------------------------------------------------------

P0, Q0, P1 = Worker(Pod("p-0")), Worker(Pod("q-0")), Worker(Pod("p-1"))  # in shards 0, 0 and 1


async def say(store: Store, worker: Worker, first: int, last: int, reset: bool = False) -> None:
    """Block N is stored by batch N; with `reset` the batches before are lost."""
    for number in range(first, last + 1):
        parent = BlockHash(number - 1) if number and not reset else None
        block, clear = BlockHash(number), Cleared(worker, ONE, ClearReason.GAP)
        change = Stored(worker, ONE, Tier.GPU, parent, (block,), 16)
        rows = {b"u%d" % number: Row(block, parent, (1, 0, 0, 0), 16)}
        changes = (clear, change) if reset else (change,)
        await store.apply(Batch(worker, ONE, number, number, changes, rows, reset))


async def drop(store: Store, worker: Worker, number: int, block: int) -> None:
    change = Removed(worker, ONE, Tier.GPU, (BlockHash(block),))
    await store.apply(Batch(worker, ONE, number, number, (change,), {b"u%d" % block: None}))


def held(view: View, worker: Worker) -> set[int]:
    return {block for stored in view.held(worker) for block in stored.blocks}


@pytest.fixture
async def sharded(clock: FakeClock) -> AsyncIterator[Shards]:
    made = Shards(clock)
    for worker in (P0, Q0, P1):
        await made.begin_life(worker, None)
        await say(made, worker, 0, 4)
    yield made


async def ticking(clock: FakeClock, condition: Callable[[], bool]) -> None:
    def ask() -> bool:
        clock.advance(0.1)
        return condition()

    await until(ask)


async def test_only_the_shard_that_was_lost_is_drawn_anew_and_the_old_answers_serve_meanwhile(
    sharded: Shards, clock: FakeClock
) -> None:
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    follower, drawing, go_on = (
        Follower(sharded, view, clock, metrics),
        asyncio.Event(),
        asyncio.Event(),
    )

    async def hold(_: str) -> None:
        drawing.set()
        await go_on.wait()

    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        other, behind = view.facts(P1), follower.cursor
        sharded.step = hold
        await say(sharded, P0, 5, 40)  # more than the stream keeps
        await sharded.forget(Q0, ONE)
        await ticking(clock, drawing.is_set)
        clock.advance(3)
        assert held(view, P0) == held(view, Q0) == set(range(5)) and follower.lag_ms() >= 3000
        assert follower.cursor == behind and follower.down_s() == 0
        sharded.open.clear()
        await say(sharded, P0, 41, 45)  # must still come before the draft is exact
        go_on.set()
        await until(lambda: view._forest._next > 3)  # the draft is there, and answers for nobody
        assert view.holders(BlockHash(30)) == {} and held(view, P0) == set(range(5))
        assert rank(view, PrefixChain(Namespace("m", 16), (BlockHash(0),)))[0].depth_blocks == 1
        sharded.open.set()
        await until(lambda: held(view, P0) == set(range(46)))
        assert view.workers() == (P0, P1), "who is not in the snapshot is gone"
        assert view.facts(P1) is other and held(view, P1) == set(range(5))
        assert follower.cursor == await sharded.head() and follower.lag_ms() == 0
        await say(sharded, P0, 46, 46)
        await until(lambda: 46 in held(view, P0))
    assert sharded.asked == [None, {0}]
    value = metrics.registry.get_sample_value
    assert value("kvplane_index_snapshots_total") == 2
    assert value("kvplane_index_store_errors_total", {"kind": "cursor_gone"}) == 1


async def test_what_another_shard_has_not_given_yet_is_neither_skipped_nor_waited_for(
    sharded: Shards, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, read = View(), sharded._next

    async def only_the_first(part: MemoryStore, mark: Cursor) -> Entry | None:
        return await read(part, mark) if part is sharded.parts[0] else None

    follower = Follower(sharded, view, clock)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        monkeypatch.setattr(sharded, "_next", only_the_first)
        await say(sharded, P1, 5, 9)
        await say(sharded, P0, 5, 40)  # more than the stream keeps
        await ticking(clock, lambda: held(view, P0) == set(range(41)))
        assert held(view, P1) == set(range(5))
        monkeypatch.setattr(sharded, "_next", read)
        await until(lambda: held(view, P1) == set(range(10)))
    assert sharded.asked == [None, {0}]


async def test_the_cursor_says_nothing_of_a_draft_that_is_not_exact_yet(
    sharded: Shards, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, read = View(), sharded._next
    follower = Follower(sharded, view, clock)

    async def only_the_second(part: MemoryStore, mark: Cursor) -> Entry | None:
        return await read(part, mark) if part is sharded.parts[1] else None

    async def write(at: str) -> None:
        if at == "behind":
            await say(sharded, P0, 41, 42)  # the draft lacks this
            monkeypatch.setattr(sharded, "_next", only_the_second)

    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        behind, sharded.step = follower.cursor, write
        await say(sharded, P0, 5, 40)
        await ticking(clock, lambda: sharded._next is not read)
        await say(sharded, P1, 5, 9)
        await until(lambda: held(view, P1) == set(range(10)))
        assert held(view, P0) == set(range(5))
        assert follower.cursor == sharded.splice(await sharded.head(), behind, {0})
        monkeypatch.setattr(sharded, "_next", read)
        await until(lambda: held(view, P0) == set(range(43)))
        assert follower.cursor == await sharded.head()


async def test_what_is_written_while_a_snapshot_is_read_is_neither_lost_nor_counted_twice(
    sharded: Shards, clock: FakeClock
) -> None:
    """Q0's snapshot holds a gap that is told again by the tail; P0's was read before a removal."""
    view = View()
    follower = Follower(sharded, view, clock)

    async def write(at: str) -> None:
        if at == f"before {P0}":
            await drop(sharded, P0, 5, 1)
        if at == f"before {Q0}":
            await drop(sharded, P0, 6, 0)
            await say(sharded, Q0, 9, 9, reset=True)
        if at == "behind":
            await say(sharded, P0, 7, 8)
            await drop(sharded, P1, 5, 4)
            sharded.open.clear()

    sharded.step = write
    async with running([follower]):
        await until(lambda: sharded.asked and view._forest._next == 3)
        assert not follower.ready.is_set() and view.workers() == (), "not exact yet"
        sharded.step = None
        sharded.open.set()
        await asyncio.wait_for(follower.ready.wait(), 5)
        assert held(view, P0) == {2, 3, 4, 7, 8} and held(view, P1) == {0, 1, 2, 3}
        facts = view.facts(Q0)
        assert facts is not None and (facts.gaps, facts.last, held(view, Q0)) == (1, 9, {9})
        await say(sharded, Q0, 20, 20, reset=True)
        await until(lambda: held(view, Q0) == {20})
        assert facts.gaps == 2


async def test_a_second_loss_while_a_draft_is_made_draws_both_shards(
    sharded: Shards, clock: FakeClock
) -> None:
    view = View()
    follower = Follower(sharded, view, clock)

    async def lose_more(_: str) -> None:
        sharded.step = None
        await say(sharded, P1, 41, 45)
        await say(sharded, P0, 5, 40)

    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        sharded.step = lose_more
        await say(sharded, P1, 5, 40)
        await ticking(clock, lambda: held(view, P0) == set(range(41)))
        await ticking(clock, lambda: held(view, P1) == set(range(46)))
        while view.sweep():
            pass
        assert view._forest._next - len(view._forest._free) == 3, "dropped drafts hold nothing"
    assert sharded.asked == [None, {1}, {0, 1}]


async def test_what_one_part_of_the_store_hides_is_partial_and_the_rest_stays_exact(
    sharded: Shards, clock: FakeClock
) -> None:
    view = View()
    await sharded.beat("i", 3600)
    for worker in (P0, P1):
        await sharded.known(Known(worker, ONE, Knowledge.EXACT, "live", 1.0, "i"))
    follower = Follower(sharded, view, clock)
    async with running([follower]):
        await until(lambda: state(view, P0) == state(view, P1) == Knowledge.EXACT)
        sharded.unread = frozenset({1})
        await ticking(clock, lambda: 1 in follower._away_since)
        assert state(view, P1) is Knowledge.EXACT  # not at once: a moment is none
        await ticking(clock, lambda: state(view, P1) is Knowledge.PARTIAL)
        assert state(view, P0) is Knowledge.EXACT
        sharded.unread = frozenset()
        await ticking(clock, lambda: state(view, P1) is Knowledge.EXACT)


# -- who lives -----------------------------------------------------------------------------------


def state(view: View, worker: Worker) -> Knowledge | None:
    known = view.known(worker)
    return known and known.state


async def test_exact_ends_with_the_last_living_ingest_and_a_dead_one_hides_nothing(
    sharded: Shards, clock: FakeClock
) -> None:
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    await sharded.beat("one", 3)
    await sharded.beat("two", 6)
    async with running([Follower(sharded, view, clock, metrics)]):
        await sharded.known(Known(P0, ONE, Knowledge.EXACT, "live", 1.0, "two"))
        await sharded.known(Known(P0, ONE, Knowledge.DARK, "cannot reach it", 2.0, "one"))
        await until(lambda: state(view, P0) is Knowledge.EXACT)
        value = metrics.registry.get_sample_value
        assert value("kvplane_index_ingests_living") == 2
        assert value("kvplane_index_worker_knowledge", {"worker": "p-0", "state": "exact"}) == 1
        for _ in range(5):
            clock.advance(1)
            await until(lambda: clock.sleeping() >= 2)
        assert state(view, P0) is Knowledge.EXACT and view.living == {"two"}
        clock.advance(2)
        await until(lambda: state(view, P0) is Knowledge.DARK)
        known = view.known(P0)
        assert (
            known is not None
            and known.reason == "no living ingest follows it: the last one was one"
        )
        assert value("kvplane_index_worker_knowledge", {"worker": "p-0", "state": "dark"}) == 1
        await sharded.beat("three", 6)  # a new one is believed as soon as it speaks
        await sharded.known(Known(P0, ONE, Knowledge.EXACT, "live", 9.0, "three"))
        await until(lambda: state(view, P0) is Knowledge.EXACT)


async def test_while_nobody_can_say_who_lives_the_last_answer_stays_and_the_store_is_away(
    sharded: Shards, clock: FakeClock
) -> None:
    view = View()
    follower = Follower(sharded, view, clock)
    await sharded.beat("i", 3)
    await sharded.known(Known(P0, ONE, Knowledge.EXACT, "live", 1.0, "i"))
    async with running([follower]):
        await until(lambda: state(view, P0) is Knowledge.EXACT)
        sharded.dumb = True
        await ticking(clock, lambda: follower.down_s() > 1)
        await say(sharded, P0, 5, 5)
        await until(lambda: 5 in held(view, P0))  # its stream goes on
        told = trust(view, {}, P0, follower.down_s())
        assert told[0] is Knowledge.PARTIAL and "does not answer since" in told[1]
        clock.advance(10)
        assert state(view, P0) is Knowledge.EXACT and follower.down_s() > 10
        sharded.dumb = False
        await ticking(clock, lambda: follower.down_s() == 0)
        assert state(view, P0) is Knowledge.DARK, "it died meanwhile"


async def test_a_question_that_is_not_answered_is_an_outage_before_it_fails(
    sharded: Shards, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, asked = View(), asyncio.Event()
    follower = Follower(sharded, view, clock)

    async def never() -> frozenset[str]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        monkeypatch.setattr(sharded, "living", never)
        await ticking(clock, asked.is_set)
        assert follower.down_s() == 0
        clock.advance(2)
        assert follower.down_s() >= 2


async def test_the_store_could_be_heard_after_the_last_question_it_answered_was_asked(
    sharded: Shards, clock: FakeClock
) -> None:
    follower = Follower(sharded, View(), clock)
    assert follower.in_touch_at() < 0
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        begun = clock.now()
        assert follower.in_touch_at() <= begun
        await ticking(clock, lambda: follower.in_touch_at() > begun)
        sharded.dumb = True
        last = follower.in_touch_at()
        await ticking(clock, lambda: follower.down_s() > 3)
        assert follower.in_touch_at() == last <= clock.now() - 3
        sharded.dumb = False
        mended = clock.now()
        await ticking(clock, lambda: follower.in_touch_at() >= mended)


async def test_a_question_that_waits_is_no_touch_and_counts_from_when_it_was_asked(
    sharded: Shards, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, asked, answers = Follower(sharded, View(), clock), asyncio.Event(), asyncio.Event()

    async def late() -> frozenset[str]:
        asked.set()
        await answers.wait()
        return frozenset()

    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        monkeypatch.setattr(sharded, "living", late)
        await ticking(clock, asked.is_set)
        before, when = follower.in_touch_at(), clock.now()
        clock.advance(7)
        assert follower.in_touch_at() == before < when
        answers.set()
        await until(lambda: follower.in_touch_at() > before)
        assert before < follower.in_touch_at() <= when, "not when the answer came"


async def test_nothing_is_heard_after_what_is_drawn_anew_was_lost(
    sharded: Shards, clock: FakeClock
) -> None:
    view, drawing, go_on = View(), asyncio.Event(), asyncio.Event()
    follower = Follower(sharded, view, clock)

    async def hold(_: str) -> None:
        drawing.set()
        await go_on.wait()

    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        sharded.step = hold
        await say(sharded, P0, 5, 40)  # more than the stream keeps
        await ticking(clock, drawing.is_set)
        lost, asked = clock.now(), follower._in_touch
        await ticking(clock, lambda: follower._in_touch > max(asked, lost))
        assert follower.in_touch_at() <= lost
        go_on.set()
        await until(lambda: follower.in_touch_at() > lost)
        assert 40 in held(view, P0)


# -- big snapshots -------------------------------------------------------------------------------


class Big(MemoryStore):
    """A snapshot of 60,000 blocks of one worker."""

    async def snapshot(self, shards: Collection[int] | None = None) -> Snapshot:
        here = await self.head()
        rows = {
            b"u%d" % n: Row(BlockHash(n), BlockHash(n - 1) if n % 500 else None, (1, 0, 0, 0), 16)
            for n in range(60_000)
        }
        table = {key: row.encode() for key, row in rows.items()}
        return Snapshot(here, (WorkerState(A, ONE, 7, (), table, 3, 5.0),), here)


async def test_others_have_their_turn_while_a_big_snapshot_is_loaded(clock: FakeClock) -> None:
    view, turns = View(), 0
    follower = Follower(Big(clock), view, clock)
    async with running([follower]):
        while not follower.ready.is_set():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20, "one slice is a few thousand blocks"
        assert count(view) == 60_000 and view.size().runs == 120
        facts = view.facts(A)
        assert facts is not None and (facts.last, facts.gaps, facts.heard) == (7, 3, 5.0)


async def test_a_follower_that_is_loading_stops_at_once_and_leaves_nothing(
    clock: FakeClock,
) -> None:
    view = View()
    follower = Follower(Big(clock), view, clock)
    await follower.start()
    async with asyncio.timeout(20.0):
        while view._forest.blocks <= 4000:  # noqa: ASYNC110 - at the first slice, not 10 ms later
            await asyncio.sleep(0)
    await asyncio.wait_for(follower.stop(), 5)
    while view.sweep():
        pass
    assert not follower.ready.is_set() and view._forest.blocks == 0 and view.workers() == ()


async def test_a_view_that_breaks_over_a_change_is_emptied_and_made_anew(
    store: MemoryStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be half of what it should be, break over the same change again and again, and
    say that all is well."""
    view, hold, retire = View(), Forest.store, Forest.retire
    registry = CollectorRegistry()
    follower, broken = Follower(store, view, clock, IndexMetrics(registry)), view._forest

    def breaks(forest: Forest, slot: int, parent: int | None, blocks: Sequence[int]) -> int:
        if forest is broken and 2 in blocks:
            raise IndexError("a fault of ours")
        return hold(forest, slot, parent, blocks)

    def refuses(forest: Forest, ordinal: int) -> None:
        if forest is broken:
            raise IndexError("nothing can be given back to what is broken")
        retire(forest, ordinal)

    monkeypatch.setattr(Forest, "store", breaks)
    monkeypatch.setattr(Forest, "retire", refuses)
    await store.begin_life(A, None)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        for number in range(3):
            await put(store, number)
        await until(lambda: count(view) == -1, what="nothing to be believed")
        assert not follower.ready.is_set(), "what is empty is no snapshot that may be gone on from"
        clock.advance(0.03)
        assert follower.lag_ms() >= 20 and follower.in_touch_at() <= clock.now() - 0.02
        clock.advance(1.0)  # until it is tried again
        await until(lambda: count(view) == 3 and follower.lag_ms() < 20)
        assert follower.ready.is_set()
        name, kind = "kvplane_index_store_errors_total", {"kind": "broken"}
        assert registry.get_sample_value(name, kind) == 1
        await put(store, 3)
        await until(lambda: count(view) == 4)
        assert follower.cursor == await store.head()

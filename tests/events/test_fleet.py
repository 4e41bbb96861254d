"""Very many streams in one process, and an engine that says more than can be taken."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import zmq
from kit.batches import payload, send, store
from kit.ingesting import ingesting, up
from kit.redis import binary, server
from kit.streams import QUICK, Publisher
from kit.wait import until
from redis.asyncio import Redis

from kvplane.events import State
from kvplane.events.sockets import raise_files, roomy
from kvplane.index import MemoryStore, RedisStore
from kvplane.vocabulary import Knowledge, Pod, Worker

STREAMS = 400  # a ZMQ context has room for 1023 sockets unless told otherwise: some 340 streams


def test_a_context_has_room_for_a_whole_fleet() -> None:
    with roomy(32_000) as context:
        assert context.get(zmq.MAX_SOCKETS) == 32_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_files() == soft == hard


async def test_all_streams_of_a_fleet_resume_after_their_publisher_was_restarted() -> None:
    settings = replace(
        QUICK, connect_s=30.0, settle_s=60.0, idle_check_s=60.0, store_check_s=60.0, replay_s=10.0,
        replays_at_once=8,
    )  # fmt: skip
    names = [f"p{at}" for at in range(STREAMS)]
    first = Publisher(topic=b"")
    async with ingesting(MemoryStore(), settings) as ingest:
        async with first:
            await send(first, 1, 2, live=False)
            for name in names:
                await ingest.subscriptions.up(up(name, first))
            await until(lambda: states(ingest) == {State.LIVE}, 60, "all streams at first")
            assert ingest.count("streams", state="live") == STREAMS
            await until(lambda: first.subscribed >= STREAMS, 60)
        await until(lambda: State.LIVE not in states(ingest), 60, "all to notice")
        again = Publisher(ports=first.ports, topic=b"", buffer=first.buffer, sequence=2)
        async with again:
            await send(again, 3, live=False)  # said while nobody listened
            await until(lambda: states(ingest) == {State.LIVE}, 60, "all streams again")
            await until(lambda: again.subscribed >= STREAMS, 60)
            await send(again, 4)
            heard = lambda: {one.sequence for one in ingest.subscriptions.following()}  # noqa: E731
            await until(lambda: heard() == {3}, 60, "every stream to hear the next batch")
            assert ingest.count("restarts_total") == 0
            await ingest.at(names[-1], 3)
            assert ingest.held(names[-1], range(6)) == [1, 2, 3, 4]


def states(ingest: object) -> set[State]:
    return {one.stream for one in ingest.subscriptions.following()}  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Longest work between two turns of the event loop so far, in seconds of CPU: others who run on
    this machine do not count, and no look for garbage among what all tests before left."""
    longest = [0.0]
    gc.collect()
    gc.freeze()

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest[0] = max(longest[0], time.thread_time() - before)
            await asyncio.sleep(0.001)

    task = asyncio.create_task(tick())
    try:
        yield longest
    finally:
        gc.unfreeze()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def test_a_store_that_stands_still_while_an_engine_talks_costs_no_memory_and_no_truth() -> (
    None
):
    """200,000 events while Redis is paused: the queue is bounded, and what it loses is replayed."""
    settings = replace(
        QUICK, receive_batches=200, drain_batches=64, replay_s=20.0, replay_total_s=60.0,
        settle_s=0.5, idle_check_s=0.5,
    )  # fmt: skip
    batches, events, names = 1000, 200, 500
    with server(binary()) as url:
        kept = RedisStore(url, "t")
        async with Publisher() as one, ingesting(kept, settings) as ingest:
            await ingest.subscriptions.up(up("p0", one))
            await one.listened()
            await send(one, 1)
            await ingest.at("p0", 0)
            parts = [
                payload(*(store(1 + (at * events + n) % names) for n in range(events)))
                for at in range(5)
            ]
            admin = Redis.from_url(url)
            await admin.client_pause(4000)
            before = resident_bytes()
            async with ticking() as longest:
                for at in range(batches):
                    await one.publish(parts[at % len(parts)])
                    if at % 10 == 0:
                        await asyncio.sleep(0)
                grown = resident_bytes() - before
                await until(lambda: ingest.of("p0").sequence == batches, 90)
                await ingest.at("p0", batches)
            assert grown < 100 << 20, grown
            assert longest[0] < 0.2, longest  # who else is on this loop is served meanwhile
            assert ingest.held("p0", range(1, names + 1)) == list(range(1, names + 1))
            await ingest.knows("p0", Knowledge.EXACT)
            assert ingest.count("replays_total", outcome="answered") >= 2, "something was lost"
            assert ingest.count("gaps_total", outcome="lost") == 0
            await admin.aclose()
        position = await kept.position(Worker(Pod("p0")))
        assert position is not None and position.last == batches
        await kept.close()

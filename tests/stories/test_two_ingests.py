"""Two ingests beside each other over one store of every kind: whoever lives is enough.

Each has a follower of its own, as two replicas of the product do.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import pytest
from kit.backends import BACKENDS, Opener, backend
from kit.batches import drop, payload, send, store
from kit.cable import Cable
from kit.ingesting import Ingest, ingesting, up
from kit.links import Mortal
from kit.streams import Publisher
from kit.wait import until

from kvplane.events import AllCleared, BlocksStored, engine_key
from kvplane.index import Store
from kvplane.vocabulary import Knowledge, Tier


@pytest.fixture(scope="module", params=BACKENDS)
def place(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Every place where the index may live."""
    with backend(request.param) as opened:
        yield opened


@dataclass
class Replica:
    """An ingest with a follower; `kill` ends it without a goodbye."""

    ingest: Ingest
    mortal: Mortal

    async def kill(self) -> None:
        self.mortal.die()
        await self.ingest.subscriptions.stop()


@contextlib.asynccontextmanager
async def replica(kept: Store) -> AsyncIterator[Replica]:
    mortal = Mortal(kept)
    async with ingesting(mortal) as ingest:  # type: ignore[arg-type]
        yield Replica(ingest, mortal)
    await kept.close()


def on_cpu(name: int, blocks: int) -> BlocksStored:
    """Copies in host memory of blocks 0.. of a prompt, named without tokens as offloading does."""
    keys = tuple(engine_key(name * 1000 + at) for at in range(blocks))
    return BlocksStored(keys, None, array("I"), 0, Tier.CPU, kind="full_attention")


async def told(kept: Store, by: str) -> Knowledge | None:
    """What an ingest last told of the one worker there is."""
    (state,) = (await kept.snapshot()).workers
    return next((known.state for known in state.known if known.by == by), None)


async def test_a_cleared_cache_is_empty_at_every_replica_and_counts_again(
    place: Opener, redis_prefix: str
) -> None:
    async with (
        Publisher(topic=b"") as a,
        Publisher(topic=b"") as b,
        replica(place(redis_prefix)) as left,
        replica(place(redis_prefix)) as right,
    ):
        replicas = (left.ingest, right.ingest)
        for one in replicas:
            await one.subscriptions.up(up("a", a))
            await one.subscriptions.up(up("b", b))
        for publisher in (a, b):
            await publisher.listened(2)
            await publisher.publish(payload(store(1, last=5)))
            await publisher.publish(payload(on_cpu(1, 5)))
        for one in replicas:
            await one.at("a", 1)
            await one.at("b", 1)
            assert (one.depth("a", 1, 5), one.depth("b", 1, 5)) == (5, 5)
        await a.publish(payload(AllCleared()))
        for one in replicas:
            await one.at("a", 2)
            assert (one.depth("a", 1, 5), one.depth("b", 1, 5)) == (0, 5)
        await a.publish(payload(store(1)))
        for one in replicas:
            await one.at("a", 3)
            assert (one.depth("a", 1, 5), one.depth("b", 1, 5)) == (1, 5)
            assert one.believed("a")[0] is Knowledge.EXACT


async def test_what_an_ingest_that_was_cut_off_said_and_died_of_does_not_hide_the_living_one(
    place: Opener, redis_prefix: str
) -> None:
    async with (
        Publisher() as engine,
        Cable(engine.ports[0]) as events,
        Cable(engine.ports[1]) as replay,
        replica(place(redis_prefix)) as left,
        replica(place(redis_prefix)) as right,
    ):
        seen, lines = right.ingest, [f"tcp://127.0.0.1:{one.listen}" for one in (events, replay)]
        far = replace(up("p0", engine), events=(lines[0],), replay=(lines[1],))
        await left.ingest.subscriptions.up(far)
        await seen.subscriptions.up(up("p0", engine))
        await engine.listened(2)
        await send(engine, 1, 2)
        await seen.at("p0", 1)
        await seen.knows("p0", Knowledge.EXACT)
        events.cut()
        replay.cut()
        name = left.ingest.subscriptions.ingest

        async def dark() -> bool:
            return await told(seen.store, name) is Knowledge.DARK

        await until(dark, what="a dark word of the ingest whose line is cut")
        await send(engine, 3)
        await seen.at("p0", 2)
        assert seen.believed("p0")[0] is Knowledge.EXACT
        await left.kill()
        await send(engine, 4)
        await engine.publish(payload(drop(1)))
        await seen.at("p0", 4)
        assert seen.believed("p0")[0] is Knowledge.EXACT
        assert seen.held("p0", (1, 2, 3, 4)) == [2, 3, 4]


async def test_one_that_dies_leaves_the_other_and_after_both_nothing_is_called_exact(
    place: Opener, redis_prefix: str
) -> None:
    async with (
        Publisher() as engine,
        replica(place(redis_prefix)) as watch,  # its follower only
        replica(place(redis_prefix)) as left,
        replica(place(redis_prefix)) as right,
    ):
        seen = watch.ingest
        for one in (left, right):
            await one.ingest.subscriptions.up(up("p0", engine))
        await engine.listened(2)
        await send(engine, 1)
        await seen.at("p0", 0)
        await left.kill()
        await send(engine, 2)
        await seen.at("p0", 1)
        await seen.knows("p0", Knowledge.EXACT)
        await right.kill()
        await send(engine, 3)
        await seen.knows("p0", Knowledge.DARK, "ingest")
        assert seen.held("p0", (1, 2)) == [1, 2]  # the last view still answers
        async with replica(place(redis_prefix)) as again:
            await again.ingest.subscriptions.up(up("p0", engine))
            await seen.knows("p0", Knowledge.EXACT)
            assert seen.held("p0", (1, 2, 3)) == [1, 2, 3]

"""A recorded engine, followed by a real `kvplane ingest` that is killed again and again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from kit.backends import PROMPT
from kit.engine import FakeEngine, fake_engine
from kit.indexed import ingest
from kit.links import Links
from kit.recording import Run, recording
from kit.streams import Publisher

from kvplane.children import Child
from kvplane.index import RedisStore
from kvplane.vocabulary import Pod, Worker

RUN: Run = min(recording()[1], key=lambda one: len(one.frames))
EVERY = 5  # borders; a process needs seconds to begin


def command(engine: FakeEngine, publisher: Publisher, redis: str, prefix: str) -> Child:
    replay = publisher.replay or ""
    words = ["--redis", redis, "--redis-prefix", prefix, "--health-check-interval-secs", "0.5"]
    words += ["--worker-urls", engine.url, "--events", publisher.events, "--replay", replay]
    return ingest("ingest", words)


@contextlib.asynccontextmanager
async def recorded(redis: str, prefix: str) -> AsyncIterator[tuple[Links, Child]]:
    """Links whose ingest is a process of its own."""
    engine = fake_engine(v1__models={"data": [{"id": "m"}]})
    async with engine as told, Publisher() as publisher:
        worker = Worker(Pod(told.url.removeprefix("http://")))
        publisher.topic = f"kv@{worker.pod}@m".encode()
        made = Links(publisher, lambda: RedisStore(redis, prefix, None, PROMPT), worker=worker)
        child = command(told, publisher, redis, prefix)
        await child.start()
        await made.begin_reader()
        try:
            yield made, child
        finally:
            await child.stop()
            await made.kill_reader()


async def test_depths_are_exact_though_the_ingest_process_is_killed_at_borders(
    redis_url: str, redis_prefix: str
) -> None:
    compared, killed = 0, 0
    async with recorded(redis_url, redis_prefix) as (made, child):
        await made.seen()
        for number in sorted({one.after for one in RUN.requests} | set(RUN.frames)):
            dies = number % EVERY == 1
            if dies and killed % 2:  # now the batch is sent while nobody listens
                child.kill()
            if number > made.sent:
                await made.send(RUN.frames[number])
            if dies:
                killed += 1
                child.kill()
                await child.stop()
                await child.start()
            await made.seen()
            for asked in RUN.between(number, number):
                assert asked.found(made.view, made.worker, RUN.block_size) == asked.cached, asked
                compared += 1
    print(f"{RUN.name}: {compared} compared over {killed} deaths of the process")
    assert compared == RUN.counts()[0] and killed >= 2

"""The recorded runs again, while the master of a sentinel's pair changes or dies at borders.

What the old master had and the new one never got is lost with it: acknowledged or not, it is heard
again from the engine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial

import pytest
from kit.backends import PROMPT
from kit.durable import Durable
from kit.links import Links, links
from kit.recording import recording
from kit.redis_sentinel import Sentinels, sentinels
from kit.streams import QUICK
from kit.wait import until

from kvplane.index import RedisStore

RUN = max(recording()[1], key=lambda one: len(one.frames))
EVERY = max(len(RUN.frames) // 5, 2)  # borders: a failover takes a second or two
LOST = len(RUN.frames) // 2  # this batch the new master never had


@pytest.fixture(scope="module")
def pair() -> Iterator[Sentinels]:
    with sentinels() as made:
        yield made


async def die_ahead(pair: Sentinels, made: Links, frames: Sequence[bytes]) -> None:
    """A batch that everybody has seen dies with the master: its replica never got it."""
    master = pair.master()
    (replica,) = (one for one in pair.servers if one is not master)
    replica.send(signal.SIGSTOP)
    await made.send(frames)
    await made.seen()
    master.kill()
    replica.send(signal.SIGCONT)
    named = partial(asyncio.to_thread, pair.master)
    await until(lambda: _is(named(), replica), 30, "the replica to be master")
    master.start()
    pair.failovers += 1


async def _is(found: Awaitable[Durable], wanted: Durable) -> bool:
    return await found is wanted


async def test_depths_are_exact_though_the_master_changes_at_borders(
    pair: Sentinels, redis_prefix: str
) -> None:
    compared, wrong = 0, []
    store = partial(RedisStore, pair.url, redis_prefix, None, PROMPT)
    async with links(store, RUN.topic, settings=QUICK) as made:
        await made.seen()
        await made.publisher.listened()
        for number in sorted({one.after for one in RUN.requests} | set(RUN.frames)):
            if number == LOST:
                await die_ahead(pair, made, RUN.frames[number])
            elif number > made.sent:
                await made.send(RUN.frames[number])
            if number > 0 and number % EVERY == 0:
                await asyncio.to_thread(pair.fail_over)
            await made.seen()
            for asked in RUN.between(number, number):
                found = asked.found(made.view, made.worker, RUN.block_size)
                compared += 1
                if found != asked.cached:
                    wrong.append((asked.n, asked.desc, found, asked.cached))
    print(f"{RUN.name}: {compared} compared over {pair.failovers} failovers")
    assert not wrong
    assert compared == RUN.counts()[0] and pair.failovers >= 5

"""Doubt: what may be wrong is said to be, and cleared where nobody can vouch for it."""

from __future__ import annotations

from array import array
from dataclasses import replace

from kit.streams import QUICK, WORKER, Followed, Publisher, following
from kit.wait import until

from kvplane.events import DIALECTS, BlocksStored, EventsSettings, engine_key
from kvplane.events.silence import Silence
from kvplane.index import MemoryStore
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Epoch, Knowledge

WATCHFUL = replace(QUICK, store_check_s=0.05)


async def send(publisher: Publisher, *names: int, live: bool = True) -> None:
    for name in names:
        tokens = array("I", [name] * 4)
        stored = BlocksStored((engine_key(name),), None, tokens, 4, kind="full_attention")
        await publisher.publish(DIALECTS["vllm"].encode(1.0, [stored], 0), live=live)


def blocks(followed: Followed) -> int:
    facts = followed.view.facts(WORKER)
    return sum(facts.counts) if facts else 0


async def test_a_store_that_lost_everything_is_noticed_though_the_engine_is_silent() -> None:
    async with Publisher() as publisher, following(publisher, settings=WATCHFUL) as followed:
        await publisher.listened()
        await send(publisher, 1, 2)
        await followed.at(1)
        await followed.knows(Knowledge.EXACT)
        await followed.store.forget(WORKER, Epoch(1))
        await until(lambda: followed.view.epoch(WORKER) == 2 and blocks(followed) == 2, 5)
        await followed.knows(Knowledge.EXACT)  # told again: the store had forgotten that too
        assert followed.count("resyncs_total", reason="lost") == 1


async def test_a_lost_connection_is_doubted_at_once() -> None:
    patient = replace(QUICK, connect_s=60.0)
    publisher = Publisher()
    async with following(publisher, settings=patient) as followed:
        async with publisher:
            await followed.knows(Knowledge.EXACT)
        await followed.knows(Knowledge.PARTIAL, "lost")


async def test_without_replay_nothing_of_before_a_new_connection_is_believed() -> None:
    first = Publisher(with_replay=False)
    second = Publisher(ports=first.ports, with_replay=False, sequence=2)
    async with following(first) as followed:
        async with first:
            await first.listened()
            await send(first, 1, 2)
            await followed.at(1)
        async with second:  # another life may have come as far as this one
            await second.listened()
            await until(lambda: blocks(followed) == 0, 5, "cleared")
            await followed.knows(Knowledge.DARK)
            await send(second, 3)
            await followed.at(2)
            assert blocks(followed) == 1
            await followed.knows(Knowledge.PARTIAL, "no replay")


async def test_what_was_missed_without_replay_is_had_by_the_first_ingest_that_has_one() -> None:
    store = MemoryStore(SystemClock())
    async with Publisher() as publisher:
        await send(publisher, 1, 2, live=False)
        publisher.with_replay = False  # in the first ingest's configuration
        async with following(publisher, store=store) as followed:
            await publisher.listened()
            await send(publisher, 3)
            await followed.at(2)
            await followed.knows(Knowledge.PARTIAL, "no replay")
            assert blocks(followed) == 1
        publisher.with_replay = True
        async with following(publisher, store=store) as followed:
            await followed.knows(Knowledge.EXACT)
            await until(lambda: blocks(followed) == 3, 5)
            assert followed.count("lives_total", by="more") == 1
    await store.close()


async def test_a_life_that_a_silent_replay_cannot_vouch_for_is_cleared_and_rebuilt_later() -> None:
    first = Publisher()
    hasty = replace(QUICK, replay_s=0.2, idle_check_s=0.1)
    async with following(first, settings=hasty) as followed:
        async with first:
            await first.listened()
            await send(first, 1, 2)
            await followed.at(1)
        second = Publisher(ports=first.ports, with_replay=False)
        await send_unheard(second, 7, 8)
        async with second:  # restarted, and its replay is not there
            await second.listened()
            await until(lambda: blocks(followed) == 0, 5, "cleared")
            await send(second, 9)
            await followed.at(2)
            await followed.knows(Knowledge.DARK)
        third = Publisher(ports=first.ports, buffer=second.buffer, sequence=3)
        async with third:
            await until(lambda: blocks(followed) == 3, 5, "all three of the new life")
            await followed.knows(Knowledge.EXACT)


async def send_unheard(publisher: Publisher, *names: int) -> None:
    await send(publisher, *names, live=False)


def test_silence_is_asked_about_soon_after_a_connection_and_then_now_and_then() -> None:
    silence = Silence(EventsSettings(settle_s=0.5, idle_check_s=30.0, store_check_s=2.0))
    silence.begin(10.0)
    assert silence.look_s == 0.5
    assert not silence.due(10.4) and silence.due(10.5)
    assert silence.look_s == 2.0
    assert not silence.due(40.4)
    silence.broken(40.4)
    assert not silence.due(70.3) and silence.due(70.4)

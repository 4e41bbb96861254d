"""Restarts and gaps: each signal of a new life is enough, and a mere reconnect is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from kit.batches import drop, held, payload, send, store, tokens
from kit.forwarder import forwarding
from kit.ingesting import ingesting, up
from kit.ports import free_port
from kit.streams import QUICK, WORKER, Publisher, following, number
from kit.wait import until

from kvplane.events import DIALECTS, AllCleared, State, frames
from kvplane.index import MemoryStore, chain, rank
from kvplane.vocabulary import Epoch, Generation, Knowledge, Namespace

CALM = replace(QUICK, settle_s=60.0, idle_check_s=60.0)  # no questions but those that must be


async def test_numbers_that_fall_back_show_a_restart_and_touch_nobody_else() -> None:
    async with (
        Publisher() as one,
        Publisher(topic=b"") as other,
        ingesting(MemoryStore(), CALM) as ingest,
    ):
        await ingest.subscriptions.up(up("p0", one))
        await ingest.subscriptions.up(up("p1", other))
        await one.listened()
        await other.listened()
        await send(one, *range(51))
        await send(other, *range(5))
        await ingest.at("p0", 50)
        await ingest.at("p1", 4)
        one.sequence, one.buffer = 0, {}
        await send(one, *range(100, 106))
        await until(lambda: ingest.held("p0", range(110)) == list(range(100, 106)))
        assert ingest.held("p1", range(110)) == list(range(5))
        assert ingest.count("restarts_total") == 1
        assert ingest.count("lives_total", by="sequence") == 1


async def test_a_digest_that_differs_shows_a_restart_behind_a_gap() -> None:
    """The new life is past our number, its first batches are lost, and no connection broke."""
    async with Publisher() as publisher, following(publisher, settings=CALM) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1, 2, 3)
        await followed.at(2)
        publisher.sequence, publisher.buffer = 0, {}
        await send(publisher, 5, live=False)
        await publisher.raw([b"", number(2), payload(store(6))])  # our number, another batch
        publisher.buffer = {0: payload(store(5)), 1: payload(store(8)), 2: payload(store(6))}
        await until(lambda: held(followed, 1, 2, 3, 5, 6, 8) == [5, 6, 8])
        assert followed.count("restarts_total") == 1


async def test_a_new_connection_with_another_life_behind_it_shows_a_restart() -> None:
    old = Publisher()
    new = Publisher(ports=old.ports)
    async with following(old, settings=CALM) as followed:
        async with old:
            await followed.knows(Knowledge.EXACT)
            await old.listened()
            await send(old, 1, 2)
            await followed.at(1)
        async with new:
            await send(new, *range(5, 9), live=False)  # past our number while nobody listened
            await followed.at(3)
            assert held(followed, 1, 2, 5, 6, 7, 8) == [5, 6, 7, 8]
            assert followed.count("lives_total", by="connection") == 1


async def test_another_life_whose_replay_begins_right_behind_our_last_batch_inherits_nothing() -> (
    None
):
    """Small buffers: no number is missing, and no batch of ours is left to compare."""
    old = Publisher()
    new = Publisher(ports=old.ports)
    async with following(old, settings=CALM) as followed:
        async with old:
            await followed.knows(Knowledge.EXACT)
            await old.listened()
            await send(old, 1, 2)
            await followed.at(1)
        async with new:
            await send(new, 5, 6, live=False, kept=False)
            await send(new, 7, 8, live=False)
            await followed.at(3)
            await followed.knows(Knowledge.PARTIAL)
            assert held(followed, 1, 2, 5, 6, 7, 8) == [7, 8]


async def test_behind_a_gap_that_replay_cannot_close_all_it_gives_is_taken() -> None:
    old = Publisher()
    new = Publisher(ports=old.ports, sequence=2)
    async with following(old, settings=CALM) as followed:
        async with old:
            await followed.knows(Knowledge.EXACT)
            await old.listened()
            await send(old, 1, 2)
            await followed.at(1)
        async with new:
            await send(new, 5, 6, live=False, kept=False)
            await send(new, 7, 8, live=False)
            await followed.at(5)
            await followed.knows(Knowledge.PARTIAL, "batches 2 to 3 are not in the replay")
            assert held(followed, 1, 2, 5, 6, 7, 8) == [7, 8]


class Holes(Publisher):
    """Whose answers never have two batches that follow each other."""

    async def _serve(self) -> None:
        whole = self.buffer
        while True:
            asker, _, asked = await self._router.recv_multipart()
            first = int.from_bytes(asked, "big")
            self.questions.append(first)
            for at in range(first, len(whole), 2):
                await self._router.send_multipart([asker, b"", number(at), whole[at]])
            await self._router.send_multipart([asker, b"", b"\xff" * 8, b""])


async def test_an_answer_with_holes_is_asked_on_for_a_few_times_only() -> None:
    async with Holes() as publisher:
        await send(publisher, *range(40), live=False)
        async with following(publisher, settings=replace(CALM, replay_rounds=3)) as followed:
            await followed.at(39)
            await followed.knows(Knowledge.PARTIAL)
            assert publisher.questions == [0, 1, 2, 3]
            assert held(followed, *range(40)) == [39]


class Muted(Publisher):
    """Whose replay may be silent."""

    silent = False

    async def _serve(self) -> None:
        while True:
            asker, _, asked = await self._router.recv_multipart()
            first = int.from_bytes(asked, "big")
            for at in sorted(self.buffer) if not self.silent else ():
                if at >= first:
                    await self._router.send_multipart([asker, b"", number(at), self.buffer[at]])
            if not self.silent:
                await self._router.send_multipart([asker, b"", b"\xff" * 8, b""])


async def test_a_gap_behind_a_silent_replay_is_closed_when_it_answers_again() -> None:
    patient = replace(CALM, replay_s=0.1)
    async with Muted() as publisher, following(publisher, settings=patient) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1)
        await followed.at(0)
        publisher.silent = True
        await send(publisher, 2, live=False)
        await send(publisher, 3)
        await until(lambda: held(followed, 1, 2, 3) == [3])
        publisher.silent = False
        await until(lambda: held(followed, 1, 2, 3) == [1, 2, 3])
        await followed.knows(Knowledge.EXACT)
        assert followed.count("lives_total", by="more") == 1


async def test_another_generation_shows_a_restart_though_nothing_else_does() -> None:
    """The engine's process start, as discovery asks it: the stream may look the same."""
    async with Publisher() as one, ingesting(MemoryStore(), CALM) as ingest:
        await ingest.subscriptions.up(up("p0", one, generation=Generation("a")))
        await one.listened()
        await send(one, *range(20))
        await ingest.at("p0", 19)
        one.sequence, one.buffer = 0, {}  # restarted within seconds: same name, same address
        await ingest.subscriptions.up(up("p0", one, generation=Generation("b")))
        await until(lambda: ingest.held("p0", range(20)) == [], what="nothing of the old life")
        await ingest.knows("p0", Knowledge.EXACT)
        await one.listened(2)
        await send(one, 30)
        await until(lambda: ingest.held("p0", range(31)) == [30])


@pytest.mark.parametrize("cuts", [1, 3])
async def test_a_mere_reconnect_is_no_restart(cuts: int) -> None:
    one = Publisher()
    async with one, forwarding(one.ports[0]) as road, ingesting(MemoryStore(), CALM) as ingest:
        seen = replace(up("p0", one), events=(f"tcp://{road.address}",))
        await ingest.subscriptions.up(seen)
        await one.listened()
        await send(one, 1, 2)
        await ingest.at("p0", 1)
        for cut in range(cuts):
            before = one.subscribed
            road.cut()
            await send(one, 10 + cut, live=False)  # said while nobody could hear it
            await one.listened(before + 1)
        await send(one, 3)
        await ingest.at("p0", 2 + cuts)
        assert ingest.held("p0", range(20)) == [1, 2, 3, *range(10, 10 + cuts)]
        await ingest.knows("p0", Knowledge.EXACT)
        assert ingest.count("restarts_total") == 0
        assert ingest.view.epoch(WORKER) == 1


async def test_a_gap_larger_than_the_buffer_clears_and_says_since_when() -> None:
    """Last heard 10, then 11 to 99 go by; replay has 50 to 99."""
    alert = replace(CALM, store_check_s=0.01)
    async with Publisher() as publisher, following(publisher, settings=alert) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, *range(11))
        await followed.at(10)
        await send(publisher, *range(11, 50), live=False, kept=False)
        for at in range(11):
            del publisher.buffer[at]
        await send(publisher, *range(50, 99), live=False)
        await send(publisher, 99)
        await followed.at(99)
        assert held(followed, *range(100)) == list(range(50, 100))
        why = (
            r"^incomplete since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: "
            r"batches 11 to 49 are not in the replay$"
        )
        await followed.knows(Knowledge.PARTIAL, why)
        for name in range(100, 120):  # followed on, and never asked for again
            await send(publisher, name)
        await followed.at(119)
        assert publisher.questions == [0, 11]
        assert followed.subscriber.stream[0] is State.PARTIAL
        assert followed.count("resyncs_total", reason="gap") == 0  # it is our own


async def test_a_replay_that_is_silent_is_asked_again_with_growing_pauses() -> None:
    quiet = replace(CALM, replay_s=0.02, replay_retry_s=0.05, replay_retry_most_s=0.8)
    async with Publisher() as publisher:
        deaf = Publisher(ports=(publisher.ports[0], free_port()))
        begun = asyncio.get_running_loop().time()
        async with following(deaf, settings=replace(quiet, store_check_s=0.02)) as followed:
            await followed.knows(Knowledge.DARK)
            await until(lambda: followed.count("replays_total", outcome="silent") >= 6)
        lasted = asyncio.get_running_loop().time() - begun
        # 0.05 + 0.1 + 0.2 + 0.4 + 0.8 and a fifth less of each; a busy machine only adds to it.
        assert lasted > 1.2, "pauses that do not grow are over in half of that"


async def test_a_first_batch_that_is_not_the_first_is_a_gap_from_zero() -> None:
    """Sent right after the bind, before our subscription had travelled."""
    async with Publisher() as publisher, following(publisher, settings=CALM) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, *range(7), live=False)
        await send(publisher, *range(7, 21))
        await followed.at(20)
        assert publisher.questions == [0, 0]
        assert held(followed, *range(21)) == list(range(21))
        await followed.knows(Knowledge.EXACT)


async def test_batches_that_come_twice_are_taken_once() -> None:
    """0 to 9, then 5 to 9 again; 6 stores X and 8 takes it away."""
    x = 77
    async with Publisher() as publisher, following(publisher, settings=CALM) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        for at in range(10):
            event = {6: store(x), 8: drop(x)}.get(at, store(at))
            await publisher.publish(payload(event))
        await followed.at(9)
        for at in range(5, 10):
            await publisher.raw([b"", number(at), publisher.buffer[at]])
        await until(lambda: followed.count("repeats_total") == 5)
        assert held(followed, *range(10), x) == [0, 1, 2, 3, 4, 5, 7, 9]
        assert followed.count("restarts_total") == 0


@pytest.mark.parametrize("ts", [12.5, 1.8e9, 4e9, 0.0, -1.0, float("inf")], ids=str)
async def test_the_clock_of_an_engine_decides_nothing(ts: float) -> None:
    async with Publisher() as publisher, following(publisher, settings=CALM) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        before = asyncio.get_running_loop().time()
        for name in (1, 2):
            await publisher.publish(DIALECTS["vllm"].encode(ts, [store(name)], 0))
        await followed.at(1)
        found = rank(followed.view, chain(tokens(1), Namespace("m", 4)), [WORKER])
        assert found[0].depth_blocks == 1 and held(followed, 1, 2) == [1, 2]
        await followed.knows(Knowledge.EXACT)
        heard = followed.subscriber.last_event
        assert heard is not None and heard >= before - 0.1  # freshness is of the receipt
        assert followed.count("lag_seconds_sum") < 60


async def test_an_engine_that_sleeps_is_dark_until_it_says_something() -> None:
    async with Publisher() as one, ingesting(MemoryStore(), CALM) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await one.listened()
        await send(one, 1)
        await ingest.at("p0", 0)
        await ingest.knows("p0", Knowledge.EXACT)
        await ingest.subscriptions.up(up("p0", one, asleep=True))
        await ingest.knows("p0", Knowledge.DARK, "sleeps")
        await ingest.subscriptions.up(up("p0", one, asleep=False))  # awake, and silent still
        await ingest.knows("p0", Knowledge.DARK)
        assert one.subscribed == 1  # the same stream all the while
        await one.publish(payload(AllCleared(), store(2)))
        await ingest.knows("p0", Knowledge.EXACT)
        assert ingest.held("p0", (1, 2)) == [2]


async def test_a_closed_port_is_dark_within_its_grace_and_clears_when_events_start() -> None:
    publisher = Publisher()
    async with ingesting(MemoryStore()) as ingest:
        await ingest.subscriptions.up(up("p0", publisher))
        reason = await ingest.knows("p0", Knowledge.DARK, "not connected")
        assert reason == f"not connected to {publisher.events}"
        assert ingest.count("streams", state="dark") == 1
        async with publisher:
            await ingest.knows("p0", Knowledge.EXACT)
            assert ingest.count("streams", state="dark") == 0
            assert ingest.count("streams", state="live") == 1
            await send(publisher, 1)
            await ingest.at("p0", 0)


async def test_a_web_server_on_the_event_port_is_named_and_not_hammered() -> None:
    taken, ends = 0, list[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        ends.append(writer)
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    publisher = Publisher()
    server = await asyncio.start_server(answer, "127.0.0.1", publisher.ports[0])
    async with server, following(publisher) as followed:
        begun = asyncio.get_running_loop().time()
        await until(lambda: "does not speak" in followed.believed()[1])
        assert str(publisher.ports[0]) in followed.believed()[1]
        await until(lambda: taken >= 4)
        lasted = asyncio.get_running_loop().time() - begun
        assert taken / lasted < 30, "a busy loop"
    for _ in range(5):  # whoever was accepted in the last moment gets as far as `answer`
        await asyncio.sleep(0)
    for end in ends:
        end.transport.abort()
    await asyncio.sleep(0)


async def test_last_words_of_an_engine_are_not_the_next_one_s() -> None:
    """Another ingest has begun the next life, while this one has still to hear the end of the last:
    replay is the new engine's already, the connection is not."""
    async with Publisher() as old, following(old, settings=CALM) as followed:
        await followed.knows(Knowledge.EXACT)
        await old.listened()
        await send(old, *range(4))
        await followed.at(3)
        old.buffer.clear()  # whoever asks now asks the new engine
        await followed.store.begin_life(WORKER, Epoch(1))

        async def noticed() -> bool:  # said before it died, heard only now
            await old.publish(payload(store(old.sequence)), kept=False)
            await asyncio.sleep(0.02)
            return followed.count("resyncs_total", reason="empty") >= 1

        await until(noticed)
        assert held(followed, *range(old.sequence)) == []
        position = await followed.store.position(WORKER)
        assert position is not None and (position.epoch, position.last) == (2, None)


@pytest.mark.parametrize("mine", [True, False])
async def test_a_first_batch_of_an_earlier_connection_is_taken_where_replay_has_it(
    mine: bool,
) -> None:
    """Else it is the only word of an engine that died, and the next one has said nothing yet."""
    old = Publisher()
    new = Publisher(ports=old.ports)
    async with following(old, settings=CALM) as followed:
        async with old:
            await followed.knows(Knowledge.EXACT)
        await until(lambda: followed.believed()[0] is not Knowledge.EXACT)
        async with new:
            await followed.knows(Knowledge.EXACT)
            if mine:
                await send(new, 1, live=False)
            frame = frames.live([b"", number(0), payload(store(1))])
            await followed.subscriber._repair.live(frame, fresh=False)
            await followed.subscriber._writer.flush()
            if mine:
                await followed.at(0)
            assert held(followed, 1) == ([1] if mine else [])
            assert followed.subscriber.sequence == (0 if mine else None)
            assert followed.count("repeats_total") == 1


async def test_an_engine_that_keeps_nothing_for_replay_is_followed_from_where_it_is() -> None:
    async with Publisher() as publisher, following(publisher, settings=CALM) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        publisher.sequence = 50  # it spoke before we came

        async def heard() -> bool:
            await publisher.publish(payload(store(publisher.sequence)), kept=False)
            await asyncio.sleep(0.02)
            return followed.subscriber.sequence is not None

        await until(heard)
        await followed.at(publisher.sequence - 1)
        assert followed.count("resyncs_total", reason="empty") == 3
        assert held(followed, publisher.sequence - 1) == [publisher.sequence - 1]
        assert followed.believed()[0] is Knowledge.PARTIAL

"""Gaps, restarts, repeats, late and garbage messages, through real sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from kit.batches import drop, held, payload, send, store
from kit.ports import free_ports, has_ipv6
from kit.streams import QUICK, WORKER, Publisher, following, lines, number
from kit.wait import until

from kvplane.events import AllCleared, State
from kvplane.index import Applied, Batch, MemoryStore, Outcome, Store, StoreDown
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Epoch, Knowledge

SINCE = r"^incomplete since 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ: "


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_an_engine_on_ipv6_is_heard_live_and_on_replay() -> None:
    async with Publisher(host="[::1]") as publisher:
        await send(publisher, 1)  # before anybody listens: only replay has it
        async with following(publisher) as followed:
            assert await followed.knows(Knowledge.EXACT)
            await publisher.listened()
            await send(publisher, 2)
            await until(lambda: held(followed, 1, 2) == [1, 2])


async def test_a_fresh_engine_is_followed_from_its_first_batch() -> None:
    async with Publisher() as publisher, following(publisher) as followed:
        assert await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1, 2)
        await followed.at(1)
        assert held(followed, 1, 2) == [1, 2]


async def test_what_was_said_before_we_listened_is_replayed() -> None:
    async with Publisher() as publisher:
        await send(publisher, 1, 2, 3, live=False)
        async with following(publisher) as followed:
            await followed.at(2)
            assert held(followed, 1, 2, 3) == [1, 2, 3]
            await followed.knows(Knowledge.EXACT)
            assert publisher.questions[0] == 0


async def test_answers_of_old_versions_have_a_frame_less() -> None:
    async with Publisher(replay_topic=False) as publisher:
        await send(publisher, 1, 2, live=False)
        async with following(publisher) as followed:
            await followed.at(1)
            assert held(followed, 1, 2) == [1, 2]


async def test_a_gap_is_asked_for_once_and_closed() -> None:
    settings = replace(QUICK, settle_s=30.0, idle_check_s=30.0)  # no other questions
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 0, 1, 2, 3)
        await followed.at(3)
        await send(publisher, 4, 5, 6, live=False)
        await send(publisher, 7, 8)
        await followed.at(8)
        assert held(followed, *range(9)) == list(range(9))
        assert publisher.questions == [0, 4]
        assert followed.count("gaps_total", outcome="closed") == 1
        assert followed.count("batches_total") == 9  # batch 7 counts once
        await followed.knows(Knowledge.EXACT)


async def test_a_replay_that_is_cut_short_before_the_gap_ends_leaves_it_open() -> None:
    """What it gave is gathered and not written yet when the rest is given up."""
    bounds = {"replay_batches": 3, "drain_batches": 1}  # an answer of more is not read on
    settings = replace(QUICK, settle_s=30.0, idle_check_s=30.0, **bounds)
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 0, 1)
        await followed.at(1)
        await send(publisher, *range(2, 12), live=False)
        await send(publisher, 12)
        await followed.at(12)
        await followed.knows(Knowledge.PARTIAL, "are not in the replay")
        assert held(followed, 12) == [12] and not held(followed, *range(12))
        assert followed.subscriber.epoch == 1  # the same life: nothing broke


async def test_a_gap_beyond_the_buffer_clears_and_says_since_when() -> None:
    settings = replace(QUICK, settle_s=30.0, idle_check_s=30.0)
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 0, 1)
        await followed.at(1)
        await send(publisher, 2, 3, live=False, kept=False)
        await send(publisher, 4, 5, live=False)
        await send(publisher, 6)
        await followed.at(6)
        assert held(followed, *range(7)) == [4, 5, 6]
        await followed.knows(Knowledge.PARTIAL, SINCE + "batches 2 to 3 are not in the replay$")
        await send(publisher, 7)
        await followed.at(7)
        assert publisher.questions == [0, 2]
        assert followed.count("gaps_total", outcome="lost") == 1
        facts = followed.view.facts(WORKER)
        assert facts is not None and facts.gaps == 1


async def test_an_engine_that_outlived_its_buffer_is_partly_known() -> None:
    async with Publisher() as publisher:
        await send(publisher, 0, 1, 2, kept=False)
        await send(publisher, 3, live=False)
        async with following(publisher) as followed:
            await followed.at(3)
            assert held(followed, 2, 3) == [3]
            await followed.knows(Knowledge.PARTIAL, SINCE + "batches 0 to 2 are not in the replay$")


async def test_a_clear_of_the_engine_makes_partial_knowledge_exact() -> None:
    async with Publisher() as publisher:
        await send(publisher, 0, kept=False)
        await send(publisher, 1, live=False)
        async with following(publisher) as followed:
            await followed.knows(Knowledge.PARTIAL)
            await publisher.listened()
            await publisher.publish(payload(AllCleared(), store(5)))
            await followed.at(2)
            await followed.knows(Knowledge.EXACT)
            assert held(followed, 1, 5) == [5]


async def test_without_replay_a_late_start_is_partly_known() -> None:
    async with Publisher(with_replay=False) as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.DARK, "nothing heard")
        await publisher.listened()
        publisher.sequence = 7
        await send(publisher, 1)
        await followed.at(7)
        await followed.knows(Knowledge.PARTIAL, SINCE + "batches 0 to 6 were missed, no replay$")
        assert held(followed, 1) == [1]


async def test_a_restarted_engine_begins_a_new_life() -> None:
    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1, 2, 3)
        await followed.at(2)
        publisher.sequence, publisher.buffer = 0, {}  # same address, empty cache
        await send(publisher, 4)
        await until(lambda: held(followed, 1, 2, 3, 4) == [4], 5)
        await followed.knows(Knowledge.EXACT)
        assert followed.view.epoch(WORKER) == 2
        assert followed.count("restarts_total") == 1


async def test_a_new_life_with_the_number_of_our_last_batch_is_noticed() -> None:
    async with Publisher(with_replay=False) as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.DARK)
        await publisher.listened()
        await send(publisher, 1)
        await followed.at(0)
        publisher.sequence = 0
        await send(publisher, 2)
        await until(lambda: held(followed, 1, 2) == [2], 5)
        assert followed.view.epoch(WORKER) == 2


async def test_a_restart_that_ran_past_our_number_is_seen_by_the_new_connection() -> None:
    ports = tuple(free_ports(2))
    old, new = Publisher((ports[0], ports[1])), Publisher((ports[0], ports[1]))
    async with following(old) as followed:
        async with old:
            await followed.knows(Knowledge.EXACT)
            await old.listened()
            await send(old, 1, 2)
            await followed.at(1)
        async with new:
            await send(new, 5, 6, 7, 8, live=False)  # nobody listened: numbers 0 to 3
            await followed.at(3)
            assert held(followed, 1, 2, 5, 6, 7, 8) == [5, 6, 7, 8]
            assert followed.view.epoch(WORKER) == 2
            await followed.knows(Knowledge.EXACT)


async def test_batches_sent_again_change_nothing() -> None:
    settings = replace(QUICK, settle_s=30.0, idle_check_s=30.0)  # replay would send more again
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await publisher.publish(payload(store(1), store(2)))
        await publisher.publish(payload(drop(1)))
        await publisher.publish(payload(store(3)))
        await followed.at(2)
        for sequence in (0, 1, 2, 0):
            await publisher.raw([b"", number(sequence), publisher.buffer[sequence]])
        await send(publisher, 4)
        await followed.at(3)
        assert held(followed, 1, 2, 3, 4) == [2, 3, 4]
        assert followed.count("repeats_total") == 4
        assert followed.count("restarts_total") == 0


async def test_a_late_batch_we_do_not_remember_is_judged_by_replay() -> None:
    settings = replace(QUICK, remembered=1)
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1, 2, 3)
        await followed.at(2)
        await publisher.raw([b"", number(0), publisher.buffer[0]])
        await send(publisher, 4)
        await followed.at(3)
        assert held(followed, 1, 2, 3, 4) == [1, 2, 3, 4]
        assert followed.count("restarts_total") == 0
        assert len(followed.subscriber._writer._seen) == 1


async def test_a_leftover_of_an_old_life_does_not_enter_the_new_one() -> None:
    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1, 2)
        await followed.at(1)
        publisher.sequence, publisher.buffer = 0, {}
        await send(publisher, 3)
        await until(lambda: held(followed, 1, 2, 3) == [3], 5)
        await publisher.raw([b"", number(5), payload(store(9))])  # was still in a queue
        await until(lambda: followed.count("repeats_total") == 1, 5)
        await send(publisher, 4)
        await followed.at(1)
        assert held(followed, 3, 4, 9) == [3, 4]
        await followed.knows(Knowledge.EXACT)
        assert followed.count("gaps_total", outcome="lost") == 0
        assert followed.view.epoch(WORKER) == 2


async def test_a_leftover_does_not_enter_where_batches_of_the_new_life_are_missing_either() -> None:
    settings = replace(QUICK, settle_s=60.0, idle_check_s=60.0)
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 3)
        await send(publisher, 6, 7, live=False)
        await publisher.raw([b"", number(5), payload(store(9))])
        await send(publisher, 4)
        await followed.at(3)
        assert held(followed, 3, 4, 6, 7, 9) == [3, 4, 6, 7]
        await followed.knows(Knowledge.EXACT)
        assert followed.count("gaps_total", outcome="lost") == 0


async def test_messages_of_other_shapes_are_counted_and_do_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1)
        garbage: list[Sequence[bytes]] = [
            [b"x"],
            [b"x", number(1)],
            [b"x", b"1234567", b"y"],
            [b"x", b"\xff" * 8, b""],
            [b"x", number(1), b"y", b"z"],
        ]
        for message in garbage * 3:
            await publisher.raw(message)
        await send(publisher, 2)
        await followed.at(1)
        assert held(followed, 1, 2) == [1, 2]
        assert followed.count("malformed_total") == 3 * len(garbage)
        said = [line for line in caplog.messages if "malformed" in line]
        assert 1 < len(said) <= len(garbage) and len(set(said)) == len(said)  # a sample of each
        await followed.knows(Knowledge.EXACT)


async def test_a_payload_nobody_can_read_clears_since_it_may_have_taken_blocks_away() -> None:
    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1)
        await publisher.publish(b"cos\nsystem\n(S'true'\ntR.")
        await send(publisher, 2)
        await followed.at(2)
        assert held(followed, 1, 2) == [2]
        assert followed.count("undecodable_total") == 1
        await followed.knows(Knowledge.PARTIAL, "batch 1 could not be decoded")


async def test_an_unknown_event_is_counted_and_the_rest_of_its_batch_applied() -> None:
    import msgspec

    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        batch: Any = msgspec.msgpack.decode(payload(store(1), store(2)))
        batch[1].insert(1, {"type": "BlockMoved", "block_hashes": [1]})
        await publisher.publish(msgspec.msgpack.encode(batch))
        await followed.at(0)
        assert held(followed, 1, 2) == [1, 2]
        assert followed.count("dropped_total", kind="unknown") == 1
        await followed.knows(Knowledge.EXACT)


async def test_members_that_nobody_knows_are_counted_by_kind_and_read_past() -> None:
    import msgspec

    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        batch: Any = msgspec.msgpack.decode(payload(store(1), store(2)))
        for event in batch[1]:
            event["a_member_of_this_test"] = 7
        await publisher.publish(msgspec.msgpack.encode(batch))
        await followed.at(0)
        assert held(followed, 1, 2) == [1, 2]
        assert followed.count("unknown_fields_total", kind="BlockStored") == 1
        await followed.knows(Knowledge.EXACT)


async def test_after_a_restart_of_ours_the_life_goes_on_where_it_stood() -> None:
    kept = MemoryStore(SystemClock())
    async with Publisher() as publisher:
        async with following(publisher, store=kept) as followed:
            await followed.knows(Knowledge.EXACT)
            await publisher.listened()
            await send(publisher, 1, 2)
            await followed.at(1)
        await send(publisher, 3, live=False)
        publisher.questions.clear()
        async with following(publisher, store=kept) as followed:
            await followed.at(2)
            assert publisher.questions[0] == 1  # from our last batch: is it still the same life?
            assert held(followed, 1, 2, 3) == [1, 2, 3]
            await publisher.publish(payload(drop(1)))
            await followed.at(3)
            assert held(followed, 1, 2, 3) == [2, 3]
            assert followed.view.epoch(WORKER) == 1
    await kept.close()


async def test_after_a_restart_of_ours_an_engine_restarted_meanwhile_is_noticed() -> None:
    kept = MemoryStore(SystemClock())
    async with Publisher() as publisher:
        async with following(publisher, store=kept) as followed:
            await followed.knows(Knowledge.EXACT)
            await publisher.listened()
            await send(publisher, 1, 2)
            await followed.at(1)
        publisher.sequence, publisher.buffer = 0, {}
        await send(publisher, 5, 6, 7, live=False)  # past our number
        async with following(publisher, store=kept) as followed:
            await followed.at(2)
            assert held(followed, 1, 2, 5, 6, 7) == [5, 6, 7]
            assert followed.view.epoch(WORKER) == 2
    await kept.close()


async def test_partial_knowledge_stays_partial_over_a_restart_of_ours() -> None:
    kept = MemoryStore(SystemClock())
    async with Publisher() as publisher:
        await send(publisher, 0, kept=False)
        await send(publisher, 1, live=False)
        for _ in range(2):
            async with following(publisher, store=kept) as followed:
                await followed.at(1)
                await until(lambda f=followed: f.subscriber.stream[0] is State.PARTIAL, 5)
        snapshot = await kept.snapshot()
        (known,) = snapshot.workers[0].known
        assert re.fullmatch(SINCE + "batches before 1", known.reason)
    await kept.close()


async def test_two_that_follow_one_engine_write_each_batch_once() -> None:
    kept = MemoryStore(SystemClock())
    async with (
        Publisher() as publisher,
        following(publisher, store=kept) as one,
        following(publisher, store=kept) as other,
    ):
        await one.knows(Knowledge.EXACT)
        await other.knows(Knowledge.EXACT)
        await publisher.listened(2)
        for name in range(30):
            await publisher.publish(payload(store(name), store(name + 100)))
            await publisher.publish(payload(drop(name + 100)))
        await one.at(59)
        await until(lambda: one.subscriber.sequence == other.subscriber.sequence == 59, 5)
        assert held(one, *range(130)) == list(range(30))
        assert one.view.epoch(WORKER) == 1
        assert one.count("restarts_total") + other.count("restarts_total") == 0
    await kept.close()


class Shaky:
    """A store that is down for the next calls, or refuses as told."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.down = 0
        self.applied: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def apply(self, batch: Batch) -> Outcome:
        if self.down:
            self.down -= 1
            raise StoreDown("memory", "on purpose")
        outcome = await self._store.apply(batch)
        if isinstance(outcome, Applied):
            self.applied.append(batch)
        return outcome


async def test_a_store_that_is_down_loses_nothing() -> None:
    shaky: list[Shaky] = []

    def wrap(store: Store) -> Shaky:
        shaky.append(Shaky(store))
        return shaky[0]

    async with Publisher() as publisher, following(publisher, wrap=wrap) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        shaky[0].down = 3
        await send(publisher, *range(20))
        await followed.at(19)
        assert held(followed, *range(20)) == list(range(20))
        assert followed.count("store_errors_total") == 3
        # what came meanwhile was written together
        assert len(shaky[0].applied) < 20
        assert sum(b.last - b.first + 1 for b in shaky[0].applied) == 20


async def test_a_store_that_lost_everything_is_filled_again_by_replay() -> None:
    # The next batch finds it, not a look at the store, which would count it as another's.
    settings = replace(QUICK, settle_s=60.0, idle_check_s=60.0, store_check_s=60.0)
    async with Publisher() as publisher, following(publisher, settings=settings) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1, 2)
        await followed.at(1)
        await followed.store.forget(WORKER, Epoch(1))
        await until(lambda: not held(followed, 1, 2), 5)
        await send(publisher, 3)
        await until(lambda: held(followed, 1, 2, 3) == [1, 2, 3], 5)
        assert followed.count("resyncs_total", reason="epoch") == 1


async def test_an_endpoint_where_nobody_listens_is_dark_until_somebody_does() -> None:
    publisher = Publisher()
    async with following(publisher) as followed:
        await followed.knows(Knowledge.DARK, f"^not connected to {publisher.events}$")
        async with publisher:
            await followed.knows(Knowledge.EXACT)


async def test_an_endpoint_that_speaks_something_else_is_named() -> None:
    publisher = Publisher()
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(publisher.events)
    try:
        async with following(publisher) as followed:
            await until(lambda: "does not speak" in followed.believed()[1], 5)
            assert followed.believed()[0] is Knowledge.DARK
            router.close(linger=0)
            async with publisher:  # now the right one listens there
                await followed.knows(Knowledge.EXACT)
    finally:
        context.destroy(linger=0)


async def test_a_replay_socket_that_never_answers_makes_a_worker_dark() -> None:
    async with Publisher() as publisher:
        deaf = replace_replay(publisher)
        async with following(deaf) as followed:
            await followed.knows(Knowledge.DARK, f"^replay at {deaf.replay} does not answer$")
            await publisher.listened()
            await send(publisher, 1)
            await followed.at(0)  # live batches are followed all the same
            assert held(followed, 1) == [1]


def replace_replay(publisher: Publisher) -> Publisher:
    """The same events, and a replay port where nobody is."""
    return Publisher(ports=(publisher.ports[0], free_ports(1)[0]))


async def test_a_lost_last_batch_is_found_in_the_silence() -> None:
    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await send(publisher, 1)
        await followed.at(0)
        await send(publisher, 2, live=False)  # and then the engine is idle
        await followed.at(1)
        assert held(followed, 1, 2) == [1, 2]


async def test_a_hole_in_an_answer_is_asked_for_again() -> None:
    class Leaky(Publisher):
        """Loses batch 2 of the first answer, as a slow reader does."""

        async def _serve(self) -> None:
            while True:
                asker, _, asked = await self._router.recv_multipart()
                first = int.from_bytes(asked, "big")
                self.questions.append(first)
                for sequence in sorted(self.buffer):
                    lost = sequence == 2 and len(self.questions) == 1
                    if sequence >= first and not lost:
                        answer = [asker, b"", b"", number(sequence), self.buffer[sequence]]
                        await self._router.send_multipart(answer)
                await self._router.send_multipart([asker, b"", b"", b"\xff" * 8, b""])

    async with Leaky() as publisher:
        await send(publisher, 0, 1, 2, 3, 4, live=False)
        async with following(publisher) as followed:
            await followed.at(4)
            assert held(followed, *range(5)) == [0, 1, 2, 3, 4]
            assert publisher.questions[:2] == [0, 2]
            await followed.knows(Knowledge.EXACT)


async def test_recorded_replay_answers_of_a_real_engine_are_taken() -> None:
    """SGLang: 5 batches sent, a buffer of 3. Known from batch 2 on, and said so."""
    told = {line.get("name"): line for line in lines("sglang-kv-events.jsonl")}
    answers = [[bytes.fromhex(f) for f in a] for a in told["replay-from-0-rank0"]["answers_hex"]]
    async with Publisher(topic=b"") as publisher:
        publisher.buffer = {int.from_bytes(a[-2], "big"): a[-1] for a in answers[:-1]}
        async with following(publisher, engine="sglang") as followed:
            await followed.at(4)
            await followed.knows(Knowledge.PARTIAL, SINCE + "batches 0 to 1 are not in the replay$")
            assert followed.count("left_out_total", reason="orphan") == 3
            live = [[bytes.fromhex(f) for f in m] for m in told["live-rank0"]["frames_hex"]]
            await publisher.listened()
            await publisher.raw(live[4])  # was in the replay already
            await until(lambda: followed.count("repeats_total") == 1, 5)


async def test_stopping_gives_everything_back() -> None:
    before = len(asyncio.all_tasks())
    async with Publisher() as publisher:
        running = len(asyncio.all_tasks())
        async with following(publisher) as followed:
            await followed.knows(Knowledge.EXACT)
        assert len(asyncio.all_tasks()) == running
        assert followed.count("workers", state="exact") == 0
    assert len(asyncio.all_tasks()) == before

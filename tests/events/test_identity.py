"""Whose stream is it? What a topic or a rank says is held against what discovery says."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from kit.batches import payload, send, store
from kit.ingesting import ingesting, up
from kit.ports import free_ports
from kit.streams import QUICK, Publisher, number
from kit.wait import until

from kvplane.index import MemoryStore
from kvplane.vocabulary import Knowledge


async def test_two_engines_of_one_address_are_told_apart_by_their_ports() -> None:
    async with (
        Publisher(topic=b"kv@127.0.0.1:8000@m") as one,
        Publisher(topic=b"kv@127.0.0.1:8001@m") as other,
        ingesting(MemoryStore()) as ingest,
    ):
        await ingest.subscriptions.up(up("a", one))
        await ingest.subscriptions.up(up("b", other, url="http://127.0.0.1:8001"))
        await one.listened()
        await other.listened()
        await send(one, 1)
        await send(other, 2)
        await ingest.at("a", 0)
        await ingest.at("b", 0)
        assert ingest.held("a", (1, 2)) == [1] and ingest.held("b", (1, 2)) == [2]
        await ingest.knows("a", Knowledge.EXACT)
        await ingest.knows("b", Knowledge.EXACT)


@pytest.mark.parametrize("told_by_replay", [True, False], ids=["replay", "live"])
async def test_the_stream_of_another_worker_is_not_taken(told_by_replay: bool) -> None:
    """The endpoint is that of a neighbour: its blocks must never count for us."""
    async with (
        Publisher(topic=b"kv@127.0.0.1:8001@m", replay_topic=told_by_replay) as neighbour,
        ingesting(MemoryStore()) as ingest,
    ):
        await send(neighbour, 1, live=False)
        await ingest.subscriptions.up(up("a", neighbour))
        await neighbour.listened()
        await send(neighbour, 2, 3)
        reason = await ingest.knows("a", Knowledge.DARK, "8001")
        assert "127.0.0.1:8000" in reason  # both names: what was told, and who we follow
        assert ingest.held("a", (1, 2, 3)) == []
        assert ingest.count("mistaken_total", what="topic") >= 1
        asked = len(neighbour.questions)
        for name in range(4, 9):
            await send(neighbour, name)
        await until(lambda: ingest.count("mistaken_total", what="topic") >= 6)
        assert len(neighbour.questions) == asked  # nothing is asked for what is not taken
        assert ingest.count("streams", state="dark") == 1


@pytest.mark.parametrize("more", [-20, 20], ids=["shorter", "longer"])
async def test_the_replay_of_another_engine_is_not_believed(more: int) -> None:
    """Two engines on one host, their replay ports mixed up: neither topic nor rank tells."""
    async with (
        Publisher(topic=b"") as other,
        Publisher(topic=b"", with_replay=False) as one,
        ingesting(MemoryStore()) as ingest,
    ):
        await send(one, *range(30), live=False)
        await send(other, *range(100, 130 + more), live=False)
        assert other.replay is not None
        await ingest.subscriptions.up(replace(up("a", one), replay=(other.replay,)))
        await one.listened()
        for name in range(30, 36):
            await send(one, name)
            await asyncio.sleep(0.02)
        await ingest.knows("a", Knowledge.DARK, "contradicts")
        assert ingest.held("a", range(200)) == []
        assert ingest.count("mistaken_total", what="replay") >= 1
        asked = len(other.questions)
        await send(one, *range(36, 60))  # beyond the other's end: still nothing is believed
        await until(lambda: ingest.count("mistaken_total", what="replay") >= 24)
        assert ingest.held("a", range(200)) == [] and len(other.questions) <= asked + 1


async def test_a_topic_without_a_port_is_taken_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with (
            Publisher(topic=b"kv@127.0.0.1@m") as one,
            ingesting(MemoryStore()) as ingest,
        ):
            await ingest.subscriptions.up(up("a", one))
            await one.listened()
            await send(one, 1, 2, 3)
            await ingest.at("a", 2)
            assert ingest.held("a", (1, 2, 3)) == [1, 2, 3]
            assert ingest.count("topics_without_port_total") == 1
    said = [line for line in caplog.messages if "taken on trust" in line]
    assert len(said) == 1 and "kv@127.0.0.1@m" in said[0]


async def test_others_on_a_shared_socket_do_not_darken_the_worker_that_is_there_too() -> None:
    async with (
        Publisher(topic=b"kv@127.0.0.1:8000@m") as shared,
        ingesting(MemoryStore()) as ingest,
    ):
        await ingest.subscriptions.up(up("a", shared))
        await shared.listened()
        await send(shared, 1)
        for at in range(3):
            await shared.raw([b"kv@127.0.0.1:8001@m", number(at), payload(store(7 + at))])
        await send(shared, 2)
        await ingest.at("a", 1)
        assert ingest.held("a", range(10)) == [1, 2]
        await ingest.knows("a", Knowledge.EXACT)
        assert ingest.count("mistaken_total", what="topic") == 3
        assert ingest.count("lives_total", by="doubt") == 0


async def test_a_stream_that_is_ours_again_is_believed_again() -> None:
    async with (
        Publisher(topic=b"kv@127.0.0.1:8001@m") as one,
        ingesting(MemoryStore()) as ingest,
    ):
        await ingest.subscriptions.up(up("a", one))
        await one.listened()
        await send(one, 1)
        await ingest.knows("a", Knowledge.DARK, "8001")
        one.topic, one.sequence, one.buffer = b"kv@127.0.0.1:8000@m", 0, {}
        await send(one, 2)
        await ingest.knows("a", Knowledge.EXACT)
        assert ingest.held("a", (1, 2)) == [2]


async def test_a_rank_whose_stream_is_another_rank_s_is_dark() -> None:
    async with Publisher() as one, Publisher() as other, ingesting(MemoryStore()) as ingest:
        await ingest.subscriptions.up(up("p0", one, other))
        await one.listened()
        await other.listened()
        await one.publish(payload(store(1), dp_rank=0))
        await other.publish(payload(store(2), dp_rank=0))  # swapped ports, or one for both
        reason = await ingest.knows("p0@1", Knowledge.DARK, "says rank 0")
        assert reason == "rank 1: rank 1's stream says rank 0"
        await ingest.knows("p0", Knowledge.EXACT)
        assert ingest.held("p0@1", (1, 2)) == [] and ingest.held("p0", (1, 2)) == [1]
        assert ingest.count("mistaken_total", what="rank") >= 1


@pytest.mark.parametrize("sequence", [0, 5])
async def test_nothing_is_asked_for_a_batch_that_is_another_ranks(sequence: int) -> None:
    calm = replace(QUICK, settle_s=60.0, idle_check_s=60.0)
    async with Publisher() as one, Publisher() as other, ingesting(MemoryStore(), calm) as ingest:
        await ingest.subscriptions.up(up("p0", one, other))
        await other.listened()
        for name in (1, 2):
            await other.publish(payload(store(name), dp_rank=1))
        await ingest.at("p0@1", 1)
        asked = len(other.questions)
        await other.raw([b"", number(sequence), payload(store(9), dp_rank=0)])
        await ingest.knows("p0@1", Knowledge.DARK, "says rank 0")
        assert len(other.questions) == asked
        assert ingest.count("lives_total", by="doubt") == 1  # and by nothing else
        assert ingest.count("lives_total", by="sequence") == 0


async def test_a_single_stream_may_number_its_rank_as_it_likes() -> None:
    """One rank a pod, many pods: the engine's own rank is not ours."""
    async with Publisher() as one, ingesting(MemoryStore()) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await one.listened()
        await one.publish(payload(store(1), dp_rank=3))
        await ingest.at("p0", 0)
        assert ingest.held("p0", [1]) == [1]


async def test_every_rank_counts_up_from_one_base_and_a_closed_one_is_named() -> None:
    events, replay = free_ports(2, run=4)
    ranks = [Publisher((events + at, replay + at)) for at in range(4)]
    async with ranks[0], ranks[1], ranks[3], ingesting(MemoryStore()) as ingest:
        for at in (0, 1, 3):
            await ranks[at].publish(payload(store(at), dp_rank=at), live=False)
        await ingest.subscriptions.up(up("p0", ranks[0], dp_size=4))
        reason = await ingest.knows("p0@2", Knowledge.DARK, "no stream")
        assert reason == f"rank 2: no stream, not connected to tcp://127.0.0.1:{events + 2}"
        for at, name in ((0, "p0"), (1, "p0@1"), (3, "p0@3")):
            await ingest.knows(name, Knowledge.EXACT)
            assert ingest.held(name, range(4)) == [at]
        assert ingest.of("p0@2").stream == "dark" and "rank 2" in ingest.of("p0@2").reason
        async with ranks[2]:
            await ranks[2].publish(payload(store(2), dp_rank=2))
            await ingest.knows("p0@2", Knowledge.EXACT)


async def test_endpoints_that_are_listed_come_before_arithmetic() -> None:
    ranks = [Publisher() for _ in range(4)]
    async with ranks[0], ranks[1], ranks[2], ranks[3], ingesting(MemoryStore()) as ingest:
        await ingest.subscriptions.up(up("p0", *ranks, dp_size=4))
        for at, rank in enumerate(ranks):
            await rank.publish(payload(store(at), dp_rank=at))
        for at, name in enumerate(("p0", "p0@1", "p0@2", "p0@3")):
            await ingest.at(name, 0)
            assert ingest.held(name, range(4)) == [at]


async def test_a_worker_s_own_topic_comes_before_the_one_of_the_settings() -> None:
    async with Publisher(topic=b"x-events") as one, ingesting(MemoryStore()) as ingest:
        await ingest.subscriptions.up(up("a", one, topic="x-events"))
        await one.listened()
        await send(one, 1)
        await one.raw([b"y-events", number(1), payload(store(9))])  # the socket filters it
        await one.raw([b"x-events-2", number(1), payload(store(2))])  # a prefix, so taken
        await ingest.at("a", 1)
        assert ingest.held("a", (1, 2, 9)) == [1, 2]

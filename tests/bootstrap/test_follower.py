"""Follower: links that break, nodes that restart or fall silent, and who is told of it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

import pytest
from kit.clock import FakeClock
from kit.hall import QUICK, TOLD, Raw, Slow, echo, hall
from kit.peer import Call, peer
from kit.ports import free_port
from kit.wait import until

from kvplane.bootstrap import (
    Address,
    Announced,
    Leader,
    Member,
    Node,
    NodeFailed,
    NodeLost,
    NodeSilent,
    NotWelcome,
    RendezvousSettings,
)
from kvplane.bootstrap.joining import (
    PROTOCOL,
    Challenge,
    Welcome,
)
from kvplane.runtime import cancel
from kvplane.vocabulary import Generation


async def test_a_node_that_leaves_is_lost_by_name_and_fails_what_it_was_asked() -> None:
    slow = Slow()
    async with hall() as here:
        node = await here.joined(handler=slow)
        out = asyncio.create_task(here.leader.ask(1, b"x"))
        await until(lambda: slow.running)
        await node.stop()
        with pytest.raises(NodeLost, match="node 1 of 2: connection closed") as caught:
            await out
        assert not isinstance(caught.value, NodeFailed | NodeSilent)
        await here.sees(1, "lost")
        said = r"node 1 of 2 was lost \d+ s ago: connection closed"
        assert re.fullmatch(said, here.leader.missing())
        assert slow.cancelled == 1
        with pytest.raises(NodeLost, match="connection closed"):
            await here.leader.ask(1, b"x")
        assert here.changes == [(1, "joined", "a"), (1, "lost", "a")]


async def test_a_silent_node_is_lost_and_comes_back_as_the_same_life() -> None:
    async with hall(silent_s=0.4) as here:
        raw = await Raw.dial(here.address)  # it never beats
        await raw.hello(generation="a")
        lost = await here.sees(1, "lost")
        assert re.match(r"silent for \d", lost.why)
        assert await raw.closed()
        await raw.leave()
        await here.joined(life="a")
        assert here.leader.states()[1].lives == 1


async def test_a_node_0_that_falls_silent_is_dialled_again() -> None:
    async def mute(call: Call) -> None:
        raw = Raw(call.reader, call.writer)
        raw.say(Challenge(protocol=PROTOCOL, nonce=b"n" * 32))
        await raw.hear()
        raw.say(Welcome(generation="g", bootstrap_host="h", bootstrap_port=1))
        await call.closed()

    async with peer(mute) as there:
        settings = RendezvousSettings(beat_s=0.05, silent_s=0.3, first_wait_s=0.02)
        address = Address("127.0.0.1", there.port)
        node = Node(address, Member(1, 2, Generation("a")), settings=settings)
        whys: list[str] = []
        node.watch(lambda told, why: whys.append(why))
        await node.join(20.0)
        await until(lambda: there.connections >= 2)
        assert any("silent for" in why for why in whys)
        await node.stop()


async def test_a_restarted_node_0_is_found_again_with_its_new_port() -> None:
    """Nodes see the link drop and dial again; the new life's port reaches them."""
    seen: list[tuple[str | None, str]] = []
    port = free_port()
    me = Member(1, 2, Generation("a"), {"tp": "4"})
    node = Node(Address("127.0.0.1", port), me, echo, settings=QUICK)
    node.watch(lambda told, why: seen.append((told and told.generation, why)))
    async with hall(port=port):
        await node.join(20.0)
    await until(lambda: node.announced is None)
    told = Announced(Generation("leader-2"), "10.0.0.1", 9000, {"tp": "4"})
    async with hall(port=port, told=told) as here:
        await until(lambda: node.announced == told)
        await here.leader.complete(20.0)
        assert await here.leader.ask(1, b"x") == b"echo x"
        await node.stop()
    said = [one for one in seen if one[0] is not None]
    assert said == [("leader-1", ""), ("leader-2", "")]
    assert any(why.endswith("connection closed") for _, why in seen)


async def test_a_restarted_node_is_named_and_its_old_link_is_fenced() -> None:
    """FR-TR-11: the new one is accepted at once, the old one wakes up and is refused for good."""
    slow = Slow()
    async with hall() as here:
        old = await here.joined(life="a", handler=slow)
        out = asyncio.create_task(here.leader.ask(1, b"x"))
        await until(lambda: slow.running)
        new = await here.joined(life="b")
        with pytest.raises(NodeLost, match="restarted: generation a was replaced by b"):
            await out
        with pytest.raises(NotWelcome, match="generation a was replaced by b"):
            await asyncio.wait_for(old.ended(), 20)
        assert "generation a was replaced by b" in old.why
        assert slow.cancelled == 1
        assert await here.leader.ask(1, b"x") == b"echo x"
        with pytest.raises(NodeLost, match="restarted: is now b, was a"):
            await here.leader.ask(1, b"x", expected=Generation("a"))
        assert await here.leader.ask(1, b"x", expected=Generation("b")) == b"echo x"
        with pytest.raises(NotWelcome, match="node 1 of 2: generation a was replaced by b"):
            await here.node(life="a").join(20.0)
        assert here.leader.states()[1].lives == 2
        assert here.counted("nodes", change="restarted") == 1
        assert here.changes == [(1, "joined", "a"), (1, "joined", "b")]
        await new.stop()


async def test_a_node_0_that_is_not_there_is_said_once_not_at_each_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "kvplane.bootstrap.follower")
    at = Address("127.0.0.1", free_port())
    node = Node(at, Member(1, 2, Generation("a"), {}), settings=QUICK)
    joining = asyncio.create_task(node.join(20.0))
    await until(lambda: caplog.text.count("node 0 not reached") >= 3)
    await cancel(joining)
    await node.stop()
    told = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert [f"why=node 0 at {at}: connection refused" in one.getMessage() for one in told] == [True]


async def test_two_nodes_of_one_rank_do_not_push_each_other_out_for_ever() -> None:
    """A wrong --node-rank: the later one stays, the earlier one ends with the reason."""
    async with hall() as here:
        nodes = [await here.joined(life=life) for life in ("a", "b", "c")]
        for node in nodes[:2]:
            with pytest.raises(NotWelcome, match="was replaced by"):
                await asyncio.wait_for(node.ended(), 20)
        assert (here.leader.states()[1].lives, len(here.changes)) == (3, 3)


async def test_a_watcher_that_fails_stops_nobody() -> None:
    def broken(*one: object) -> None:
        raise RuntimeError("watcher")

    async with hall() as here:
        here.leader.watch(broken)
        node = here.node()
        undo: Callable[[], None] = node.watch(broken)
        await node.join(20.0)
        await here.leader.complete(20.0)
        undo()
        assert await here.leader.ask(1, b"x") == b"echo x"


async def test_when_we_slept_it_is_not_they_who_were_silent(clock: FakeClock) -> None:
    """A stopped process that wakes up reads what was said to it before it judges."""
    leader = Leader(Address("127.0.0.1", 0), 2, TOLD, clock, RendezvousSettings())
    await leader.start()
    raw = await Raw.dial(Address("127.0.0.1", leader.port))
    await raw.hello()
    await until(clock.sleeping)
    clock.advance(600.0)
    await until(clock.sleeping)
    assert leader.states()[1].state == "joined"

    def lost() -> bool:  # awake, and nothing comes
        clock.advance(0.5)
        return leader.states()[1].state == "lost"

    await until(lost)
    assert "silent for" in leader.states()[1].why
    await raw.leave()
    await leader.stop()

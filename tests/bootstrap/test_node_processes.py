"""Nodes as real processes: killed, stopped, woken and replaced."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from kit.node_process import SETTINGS, Child, work
from kit.ports import free_port
from kit.wait import until

from kvplane.bootstrap import Address, Announced, Leader, Member, Node, NodeLost
from kvplane.vocabulary import Generation

TOLD = Announced(Generation("leader"), "127.0.0.1", 8998)


@dataclass
class Site:
    """Node 0 here, node 1 in processes."""

    leader: Leader
    stack: AsyncExitStack

    async def start(self, life: str) -> Child:
        child = await Child("node", self.leader.port, life).start()
        self.stack.push_async_callback(child.stop)
        return child

    async def joined(self, life: str) -> Child:
        child = await self.start(life)
        await self.sees("joined", life)
        return child

    async def sees(self, state: str, life: str) -> str:
        def now() -> bool:
            node = self.leader.states()[1]
            return (node.state, node.generation) == (state, life)

        await until(now, 30)
        return self.leader.states()[1].why

    async def asked(self, child: Child) -> None:
        assert await self.leader.ask(1, b"x", 20.0) == b"%d x" % child.pid


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    leader = Leader(Address("127.0.0.1", 0), 2, TOLD, settings=SETTINGS)
    await leader.start()
    async with AsyncExitStack() as stack:
        yield Site(leader, stack)
        await leader.stop()


async def test_a_killed_node_is_lost_at_once_and_its_next_life_is_named(site: Site) -> None:
    """FR-TR-07, FR-TR-11: without sign-off, restarted at once under the same name."""
    child = await site.joined("a")
    await site.asked(child)
    out = asyncio.create_task(site.leader.ask(1, b"hang"))
    await asyncio.sleep(0)
    child.send(signal.SIGKILL)
    with pytest.raises(NodeLost, match="node 1 of 2: connection"):
        await asyncio.wait_for(out, 20)
    await site.sees("lost", "a")
    assert re.match(r"node 1 of 2 was lost \d+ s ago: connection", site.leader.missing())
    again = await site.joined("b")
    assert site.leader.states()[1].lives == 2
    await site.asked(again)


async def test_a_stopped_node_is_given_up_in_time_and_taken_back_when_it_wakes(
    site: Site,
) -> None:
    child = await site.joined("a")
    out = asyncio.create_task(site.leader.ask(1, b"hang"))
    await asyncio.sleep(0)
    child.send(signal.SIGSTOP)
    with pytest.raises(NodeLost, match=r"node 1 of 2: silent for \d\.\d s"):
        await asyncio.wait_for(out, 20)
    assert "was lost" in site.leader.missing()
    child.send(signal.SIGCONT)
    await site.sees("joined", "a")
    await site.asked(child)
    assert site.leader.states()[1].lives == 1  # nobody was started again
    assert site.leader.missing() == ""


async def test_a_stopped_node_that_was_replaced_wakes_up_and_is_refused(site: Site) -> None:
    """FR-TR-11: the old process wakes up; it is fenced, the new one works on."""
    old = await site.joined("a")
    old.send(signal.SIGSTOP)
    new = await site.joined("b")
    old.send(signal.SIGCONT)
    refused = await until(lambda: old.heard(event="refused"), 30)
    assert refused is not None
    assert "generation a was replaced by b" in refused["why"]
    assert await old.ended() == 0
    await site.asked(new)
    assert site.leader.states()[1].generation == "b"


async def test_a_node_0_that_stops_wakes_or_is_replaced_is_found_again() -> None:
    """Nodes see the link drop and dial again until node 0 is back."""
    port = free_port()
    me = Member(1, 2, Generation("a"))
    node = Node(Address("127.0.0.1", port), me, work, settings=SETTINGS)
    lost: list[str] = []
    node.watch(lambda told, why: None if told else lost.append(why))
    first = await Child("leader", port, "first").start()
    try:
        await node.join(30.0)
        first.send(signal.SIGSTOP)
        await until(lambda: any("silent for" in why for why in lost), 30)
        await until(lambda: "no welcome" in node.why, 30)  # the kernel accepts, nobody speaks
        first.send(signal.SIGCONT)
        await until(lambda: node.announced, 30)
        assert node.announced is not None and node.announced.generation == "first"
        first.send(signal.SIGKILL)
        await until(lambda: "connection refused" in node.why, 30)
    finally:
        await first.stop()
    second = await Child("leader", port, "second").start()
    try:
        await until(lambda: node.announced and node.announced.generation == "second", 30)
        assert await until(lambda: second.heard(event="node", state="joined"), 30)
    finally:
        await node.stop()
        await second.stop()

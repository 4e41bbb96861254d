"""Rendezvous: the nodes of an instance meet at node 0, learn its port, and strangers do not."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from kit.clock import FakeClock
from kit.directory import rank, serving
from kit.hall import QUICK, TOLD, Raw, echo, hall
from kit.peer import Call, peer
from kit.ports import free_port, has_ipv6
from kit.wait import until

from kvplane.bootstrap import (
    Address,
    Announced,
    BootstrapClient,
    Leader,
    Member,
    Node,
    NodesMissing,
    NotWelcome,
    Registration,
    RendezvousSettings,
    fresh_session,
)
from kvplane.bootstrap.joining import (
    PROTOCOL,
    Ask,
    Beat,
    Challenge,
    Refusal,
    Welcome,
    frame,
)
from kvplane.vocabulary import Generation


async def test_the_leaders_port_reaches_all_nodes_before_they_register() -> None:
    """Port sync: all ranks of the instance register at node 0's directory, whatever port it got."""
    async with serving() as seat, fresh_session() as session:
        told = Announced(Generation("g1"), "127.0.0.1", seat.port)
        async with hall(3, told=told) as here:
            client = BootstrapClient(session)

            async def start(number: int) -> None:
                node = here.node(number, facts={})
                found = await node.join(20.0)
                at = str(Address(found.bootstrap_host, found.bootstrap_port))
                me = rank(attn_tp_size=3, attn_tp_rank=number, generation=found.generation)
                await client.register(at, Registration.parse(me))

            me = rank(attn_tp_size=3, attn_tp_rank=0, generation="g1")
            own = client.register(seat.address, Registration.parse(me))
            await asyncio.gather(own, start(1), start(2), here.leader.complete(20.0))
            topology, life = await client.topology(seat.address)
            assert (topology.attn_tp_size, life) == (3, "g1")


async def test_nodes_may_dial_before_node_0_listens() -> None:
    """FR-OP-07, FR-BS-02: start-up order does not matter."""
    port = free_port()
    me = Member(1, 2, Generation("a"), {"tp": "4"})
    node = Node(Address("127.0.0.1", port), me, echo, settings=QUICK)
    joining = asyncio.create_task(node.join(20.0))
    await until(lambda: "connection refused" in node.why)
    async with hall(port=port) as here:
        assert await joining == TOLD
        await here.leader.complete(20.0)
        assert here.leader.missing() == ""
        await node.stop()


async def test_a_node_0_that_never_comes_is_named() -> None:
    address = Address("127.0.0.1", free_port())
    node = Node(address, Member(1, 2, Generation("a")), settings=QUICK)
    with pytest.raises(NodesMissing) as caught:
        await node.join(0.3)
    want = f"node 1 of 2: node 0 at {address}: connection refused (tried for 0 s)"
    assert str(caught.value) == want
    await node.stop()


async def test_a_node_that_does_not_come_is_named(clock: FakeClock) -> None:
    """A late node is named, with how long it was waited for."""
    leader = Leader(Address("127.0.0.1", 0), 3, TOLD, clock, QUICK)
    await leader.start()
    waiting = asyncio.create_task(leader.complete(30.0))
    await until(clock.sleeping)
    clock.advance(30.0)
    with pytest.raises(NodesMissing) as caught:
        await waiting
    assert str(caught.value) == "nodes 1, 2 of 3 have not joined within 30 s"
    assert leader.missing() == str(caught.value)
    await leader.stop()


async def test_a_wildcard_node_0_is_told_under_the_name_it_was_dialled_by() -> None:
    """FR-BS-13: node 0 binds to all addresses and names none; never a wildcard is told."""
    async with hall(told=Announced(Generation("g"), "", 8998, {"tp": "4"})) as here:
        assert (await here.node().join(20.0)).bootstrap_host == "127.0.0.1"
    async with hall(told=Announced(Generation("g"), "0.0.0.0", 8998, {"tp": "4"})) as here:
        with pytest.raises(NodesMissing, match=r"bootstrap 0\.0\.0\.0:8998 is no address"):
            await here.node().join(0.5)


@pytest.mark.skipif(not has_ipv6(), reason="[::1] cannot be listened on here")
async def test_nodes_meet_over_ipv6() -> None:
    """FR-BS-04"""
    leader = Leader(Address("::1", 0), 2, TOLD, settings=QUICK)
    await leader.start()
    node = Node(Address.of("[::1]", leader.port), Member(1, 2, Generation("a"), {"tp": "4"}), echo)
    assert await node.join(20.0) == TOLD
    await until(lambda: leader.states()[1].address.startswith("[::1]:"))
    await node.stop()
    await leader.stop()


async def test_a_port_that_is_taken_is_named() -> None:
    async with hall() as here:
        other = Leader(here.address, 2, TOLD)
        with pytest.raises(OSError, match=f"rendezvous cannot listen on {here.address}"):
            await other.start()


@pytest.mark.parametrize(("changes", "why"), [
    ({"nnodes": 4}, "nnodes: 4 there, 2 at node 0"),
    ({"facts": {"tp": "2"}}, "tp: 2 there, 4 at node 0"),
])  # fmt: skip
async def test_a_node_that_does_not_belong_ends_with_the_reason(
    changes: dict[str, Any], why: str
) -> None:
    async with hall() as here:
        node = here.node(**changes)
        with pytest.raises(NotWelcome, match=why) as caught:
            await node.join(20.0)
        assert str(here.address) in str(caught.value)
        with pytest.raises(NotWelcome):
            await node.ended()
        assert here.leader.states()[1].state == "absent"


async def test_only_who_knows_the_secret_joins_and_it_is_never_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with hall(secret="open sesame") as here:
        for secret in ("", "open sesam"):
            with pytest.raises(NotWelcome, match=r"write-key.: must be the same on all nodes"):
                await here.node(secret=secret).join(20.0)
        assert here.counted("strangers", reason="secret") == 2
        node = await here.joined()
        assert await here.leader.ask(1, b"x") == b"echo x"
        await node.stop()
        raw = await Raw.dial(here.address)
        refused = await raw.hello(proof=b"x" * 32, node_rank=77)
        assert refused == Refusal(
            reason="secret (--write-key): must be the same on all nodes", final=True
        )
        await raw.leave()
    assert "sesam" not in caplog.text


async def test_a_node_does_not_work_for_a_node_0_without_the_secret() -> None:
    async with hall() as here:
        with pytest.raises(NotWelcome, match="it does not know the secret"):
            await here.node(secret="open sesame").join(20.0)


@pytest.mark.parametrize("said", [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00" * 64, b"\xff" * 64,
    frame(Beat()), frame(Ask(id=1, body=b"x")), b"\x00\x00\x00\x05hello",
])  # fmt: skip
async def test_garbage_is_refused_counted_and_closed(said: bytes) -> None:
    async with hall() as here:
        await here.joined()
        raw = await Raw.dial(here.address)
        raw.writer.write(said)
        assert await raw.closed()
        assert here.counted("strangers", reason="garbage") == 1
        assert here.leader.states()[1].state == "joined"  # others are unaffected
        assert await here.leader.ask(1, b"x") == b"echo x"
        await raw.leave()


async def test_silent_and_half_sockets_are_closed_in_time_and_bounded_in_number() -> None:
    async with hall(hello_s=1.5, most_strangers=3) as here:
        silent = [await Raw.dial(here.address) for _ in range(3)]
        for raw in silent:
            await raw.hear()
        silent[0].writer.write(frame(Beat())[:3])
        more = await Raw.dial(here.address)
        assert isinstance(await more.hear(), Refusal)
        assert await more.closed()
        for raw in silent:
            last = await raw.hear()
            assert last == Refusal(reason="no hello within 1.5 s", final=False)
            assert await raw.closed()
        assert here.counted("strangers", reason="silent") == 3
        assert here.counted("strangers", reason="full") == 1
        gone = await Raw.dial(here.address)
        await gone.leave()
        await until(lambda: here.counted("strangers", reason="closed") == 1)
        await here.joined()
        for raw in (*silent, more):
            await raw.leave()


async def test_another_protocol_is_named_on_both_sides() -> None:
    async with hall() as here:
        raw = await Raw.dial(here.address)
        refused = await raw.hello(protocol="kvplane-rendezvous-2")
        assert isinstance(refused, Refusal)
        assert refused.reason == f"protocol 'kvplane-rendezvous-2': must be {PROTOCOL}"
        await raw.leave()

    async def other(call: Call) -> None:
        await call.send(frame(Challenge(protocol="kvplane-rendezvous-2", nonce=b"")))
        await call.closed()

    async with peer(other) as there:
        address = Address("127.0.0.1", there.port)
        node = Node(address, Member(1, 2, Generation("a")), settings=QUICK)
        with pytest.raises(NotWelcome, match="it speaks 'kvplane-rendezvous-2', we speak"):
            await node.join(20.0)


@pytest.mark.parametrize(("said", "why"), [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no node 0 of ours: frame of"),
    (frame(Beat()), "no node 0 of ours: Beat where a challenge was due"),
    (b"", "no welcome within 0.3 s"),
])  # fmt: skip
async def test_something_else_at_the_address_is_told_as_such(said: bytes, why: str) -> None:
    async def other(call: Call) -> None:
        await call.send(said)
        await call.closed()

    async with peer(other) as there:
        hello_s = 20.0 if said else 0.3
        settings = RendezvousSettings(hello_s=hello_s, first_wait_s=0.02, most_wait_s=0.1)
        address = Address("127.0.0.1", there.port)
        node = Node(address, Member(1, 2, Generation("a")), settings=settings)
        with pytest.raises(NodesMissing, match=f"node 0 at {address}: {why}"):
            await node.join(1.0)
        await node.stop()
        await until(lambda: there.open == 0)  # nothing is left open


async def test_garbage_on_a_joined_link_ends_that_link_only() -> None:
    async with hall(3) as here:
        await here.joined(2)
        raw = await Raw.dial(here.address)
        assert isinstance(await raw.hello(nnodes=3), Welcome)
        await here.sees(1, "joined")
        raw.say(Challenge(protocol=PROTOCOL, nonce=b""))
        lost = await here.sees(1, "lost")
        assert lost.why == "garbage: Challenge on a link that has joined"
        assert "node 1 of 3 was lost" in here.leader.missing()
        assert await here.leader.ask(2, b"x") == b"echo x"
        await raw.leave()


@pytest.mark.parametrize("how", ["closed", "open", "secret"])
async def test_a_node_of_another_machine_needs_the_secret_or_an_open_door(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-BS-05 for nodes: whoever knows the facts must not fence a real node from afar."""
    monkeypatch.setattr("kvplane.bootstrap.rendezvous.is_local", lambda who: False)
    secret = "s" if how == "secret" else ""
    async with hall(2, open_joins=how == "open", secret=secret) as here:
        node = here.node(1)
        if how != "closed":
            await node.join(20.0)
            return
        with pytest.raises(NotWelcome, match=r"must be on this machine.*--write-key"):
            await node.join(20.0)

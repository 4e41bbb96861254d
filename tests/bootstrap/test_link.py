"""Link: node 0 lets a node work; many questions at once, and none that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest
from kit.hall import Raw, Slow, hall
from kit.peer import Call, peer
from kit.wait import until

from kvplane.bootstrap import (
    Address,
    BadInput,
    Member,
    Node,
    NodeFailed,
    NodeLost,
    NodeSilent,
    RendezvousSettings,
)
from kvplane.bootstrap.joining import (
    PROTOCOL,
    Answer,
    Ask,
    Challenge,
    Message,
    Welcome,
)
from kvplane.vocabulary import Generation


async def test_many_questions_are_out_at_once_and_answered_in_any_order() -> None:
    gates = {i: asyncio.Event() for i in range(50)}

    async def work(body: bytes) -> bytes:
        await gates[int(body)].wait()
        return body * 2

    async with hall() as here:
        await here.joined(handler=work)
        asked = [asyncio.create_task(here.leader.ask(1, b"%d" % i)) for i in range(50)]
        for i in reversed(range(50)):
            gates[i].set()
            assert await asked[i] == b"%d" % i * 2
        assert here.counted("asks", outcome="ok") == 50


async def test_bodies_of_a_megabyte_pass_and_larger_ones_are_refused() -> None:
    async with hall() as here:
        await here.joined(handler=lambda body: same(body if len(body) > 1 else b"y" * (2**20 + 1)))
        body = bytes(range(256)) * 4096
        answers = await asyncio.gather(*(here.leader.ask(1, body) for _ in range(8)))
        assert answers == [body] * 8
        with pytest.raises(BadInput, match="body '1048577 bytes': must be at most 1048576"):
            await here.leader.ask(1, body + b"x")
        with pytest.raises(NodeFailed, match="answer of 1048577 bytes: must be at most 1048576"):
            await here.leader.ask(1, b"x")


async def same(body: bytes) -> bytes:
    return body


async def test_what_a_handler_raises_reaches_who_asked_and_harms_nobody() -> None:
    async def work(body: bytes) -> bytes:
        if body == b"cancel":
            raise asyncio.CancelledError
        raise ValueError("no such layer") if body else KeyError

    async with hall() as here:
        await here.joined(handler=work)
        for body, why in ((b"x", "no such layer"), (b"", "KeyError"), (b"cancel", "was cancelled")):
            with pytest.raises(NodeFailed, match=f"node 1 of 2: .*{why}"):
                await here.leader.ask(1, body, 20.0)
        assert here.leader.states()[1].state == "joined"


async def test_a_node_without_a_handler_says_so() -> None:
    async with hall() as here:
        await here.joined(handler=None)
        with pytest.raises(NodeFailed, match="no questions are answered here"):
            await here.leader.ask(1, b"x")


async def test_who_leaves_or_waits_too_long_cancels_the_work_there() -> None:
    slow = Slow()
    async with hall() as here:
        await here.joined(handler=slow)
        leaving = asyncio.create_task(here.leader.ask(1, b"x"))
        await until(lambda: slow.running == 1)
        leaving.cancel()
        await until(lambda: slow.cancelled == 1)
        with pytest.raises(NodeSilent, match=r"node 1 of 2: no answer within 0\.1 s"):
            await here.leader.ask(1, b"x", deadline_s=0.1)
        await until(lambda: slow.cancelled == 2)
        slow.go.set()
        assert await here.leader.ask(1, b"fine") == b"fine"
        assert here.counted("asks", outcome="left") == 1
        assert here.counted("asks", outcome="silent") == 1


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped_and_counted() -> None:
    async with hall() as here:
        raw = await Raw.dial(here.address)
        await raw.hello()
        await here.sees(1, "joined")
        with pytest.raises(NodeSilent):
            await here.leader.ask(1, b"x", deadline_s=0.05)
        question = await raw.hear()
        assert isinstance(question, Ask)
        raw.say(Answer(id=question.id, body=b"late"))
        raw.say(Answer(id=99, body=b"of nothing"))
        await until(lambda: here.counted("asks", outcome="late") == 2)
        assert here.leader.states()[1].state == "joined"
        await raw.leave()


async def test_unanswered_questions_are_bounded() -> None:
    slow = Slow()
    async with hall(most_asks=3) as here:
        await here.joined(handler=slow)
        out = [asyncio.create_task(here.leader.ask(1, b"x")) for _ in range(3)]
        await until(lambda: slow.running == 3)
        with pytest.raises(NodeFailed, match="3 questions are not answered yet"):
            await here.leader.ask(1, b"x")
        assert here.counted("asks", outcome="busy") == 1
        slow.go.set()
        assert await asyncio.gather(*out) == [b"x"] * 3


@pytest.mark.parametrize("asked", [1, 2, 0, -1])
async def test_a_node_that_is_not_there_cannot_be_asked(asked: int) -> None:
    async with hall() as here:
        why = "has not joined yet" if asked == 1 else "must be 1 to 1"
        with pytest.raises(NodeLost, match=f"node {asked} of 2: {why}"):
            await here.leader.ask(asked, b"x")


async def test_a_node_0_that_floods_a_node_is_bounded_there_too() -> None:
    slow = Slow()
    settings = RendezvousSettings(most_asks=2, first_wait_s=0.02)
    heard: list[Message] = []

    async def node_0(call: Call) -> None:
        raw = Raw(call.reader, call.writer)
        raw.say(Challenge(protocol=PROTOCOL, nonce=b"n" * 32))
        await raw.hear()
        raw.say(Welcome(generation="g", bootstrap_host="h", bootstrap_port=1))
        for number in (1, 2, 3):
            raw.say(Ask(id=number, body=b"x"))
        heard.append(await raw.hear())
        raw.say(Ask(id=1, body=b"again"))  # twice the same: garbage
        await raw.closed()

    async with peer(node_0) as there:
        address = Address("127.0.0.1", there.port)
        node = Node(address, Member(1, 2, Generation("a")), slow, settings=settings)
        whys: list[str] = []
        node.watch(lambda told, why: whys.append(why))
        await node.join(20.0)
        await until(lambda: slow.cancelled >= 2)  # with the link ends its work
        assert getattr(heard[0], "reason", "") == "2 questions are in work"
        await until(lambda: any("garbage: question 1 is asked twice" in why for why in whys))
        await node.stop()

"""Whole rooms over the real libraries, between processes that are stopped, woken, killed, replaced.

What a one-sided library promises least is what these ask for: a stopped peer that wakes up writes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest
from kit import rank_process as kit
from kit.rank_child import Child
from kit.wait import until

from kvplane.transfer import DeadlineExceeded, Metadata, PeerGone, TransferError, TransferMetrics

FOREIGN = 0xEE  # what others write to pages that were given back


class Decode:
    """A decode rank in this process that pulls from a child."""

    async def start(self, name: str, port: int) -> Decode:
        self.metrics, self.memory = TransferMetrics(), kit.memory(2)
        self.before = self.memory.copy()
        self.released: list[int] = []
        self.backend = await kit.backend_of(self.memory, self.metrics, name)
        self.resolver = kit.OneRank(kit.Endpoint("127.0.0.1", port))
        self.puller = kit.puller_of(self.backend, self.metrics, self.resolver)
        return self

    def begin(self, room: int, deadline_s: float = 8.0) -> asyncio.Task[Metadata]:
        pulled = kit.pull(self.puller, room, self.released.extend, deadline_s)
        return asyncio.create_task(pulled)

    async def moving(self) -> None:
        """Bytes are landing."""
        await until(lambda: (self.memory[:, 0] != self.before[:, 0]).any(), what="a first page")

    async def given_back(self) -> None:
        await until(lambda: len(self.released) == kit.PAGES, 30, what="all pages given back")
        held = (self.puller, self.backend)
        await until(lambda: not any(any(one.counts().values()) for one in held))

    async def stop(self) -> None:
        await self.puller.close()
        await self.backend.stop()


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    made = Decode()
    yield made
    await made.stop()


async def prefill(name: str, children: list[Child], generation: str = "p1") -> Child:
    children.append(Child("prefill", "0", generation, backend=name))
    return await children[-1].start()


async def answered(decode: Decode, child: Child, room: int) -> None:
    """A whole room goes well."""
    child.room(room)
    got = await asyncio.wait_for(decode.begin(room), 10)
    assert got.first_token == 7 and np.array_equal(decode.memory, kit.memory(1))


async def test_rooms_are_answered_one_after_the_other(
    name: str, children: list[Child], decode: Decode
) -> None:
    child = await prefill(name, children)
    await decode.start(name, child.port)
    for room in (71, 72, 73):
        decode.memory[:] = 0
        await answered(decode, child, room)
    held = (decode.puller, decode.backend)
    await until(lambda: not any(any(one.counts().values()) for one in held))
    assert decode.backend._sessions.rotations == 0, "nothing was fenced"  # type: ignore[attr-defined]


async def stopped(name: str, children: list[Child], decode: Decode) -> Child:
    """A prefill is stopped in the middle of a room; the pull has failed, its pages are away."""
    child = await prefill(name, children)
    await decode.start(name, child.port)
    pull = decode.begin(71, deadline_s=2.0)
    child.room(71)
    await decode.moving()
    child.send(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="the prefill's commit not within"):
        await asyncio.wait_for(pull, 10)
    assert len(decode.puller.quarantine) == kit.PAGES, "not one page is free before the fence"
    return child


async def woken(decode: Decode, child: Child) -> int:
    """Bytes that landed in pages which were given to others, after it woke up."""
    await decode.given_back()
    decode.memory[:] = FOREIGN
    child.send(signal.SIGCONT)
    await until(lambda: child.outcome(71), 30)
    assert child.outcome(71)["ok"] is False, "the woken one knows that it failed"
    return int((decode.memory != FOREIGN).sum())


async def test_a_prefill_stopped_in_the_middle_writes_nothing_when_it_wakes(
    name: str, children: list[Child], decode: Decode
) -> None:
    """FR-TR-04 (c), FR-TR-11 where nobody can refuse a write: the session was ended."""
    child = await stopped(name, children, decode)
    assert await woken(decode, child) == 0, "not one late byte"
    decode.released.clear()
    await answered(decode, child, 72)  # no restart of anybody


async def test_it_is_the_fence_that_keeps_late_bytes_out(
    name: str, children: list[Child], decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: believed to be clean, the same peer does write."""
    child = await stopped(name, children, decode)
    fence = decode.backend.fence
    monkeypatch.setattr(decode.backend, "fence", lambda landing, clean=False: fence(landing, True))
    assert await woken(decode, child) > 0


async def test_a_prefill_killed_in_the_middle_is_gone_and_its_successor_is_met(
    name: str, children: list[Child], decode: Decode
) -> None:
    child = await prefill(name, children)
    await decode.start(name, child.port)
    pull = decode.begin(71)
    child.room(71)
    await decode.moving()
    child.send(signal.SIGKILL)
    with pytest.raises(PeerGone, match=f"127.0.0.1:{child.port} is gone"):
        await asyncio.wait_for(pull, 5)
    await decode.given_back()
    successor = await prefill(name, children, "p2")
    decode.resolver.endpoint_.port = successor.port
    decode.released.clear()
    await answered(decode, successor, 72)


async def test_a_decode_stopped_in_the_middle_is_given_up_in_time_and_its_successor_is_served(
    name: str, children: list[Child]
) -> None:
    metrics, array = TransferMetrics(), kit.memory(1)
    backend = await kit.backend_of(array, metrics, name)
    offers = kit.offers_of(backend, metrics, "p1")
    port = await offers.start("127.0.0.1")
    try:
        for room in (71, 81):
            children.append(Child("decode", f"127.0.0.1:{port}", backend=name))
            await children[-1].start()
            child = children[-1]
            child.room(room)
            await until(lambda: offers.counts()["rooms"])
            sent = asyncio.create_task(kit.deliver(offers, room, 1.5))
            await until(lambda: backend.counts()["writing"])
            child.send(signal.SIGSTOP)
            with pytest.raises(TransferError):
                await asyncio.wait_for(sent, 5)
            await until(lambda: not any(offers.counts().values()))
            child.send(signal.SIGCONT)
            await until(lambda child=child, room=room: child.outcome(room), 30)
            assert child.outcome(room)["ok"] is False, child.said
            child.room(room + 1)
            await asyncio.wait_for(kit.deliver(offers, room + 1), 10)
            await until(lambda child=child, room=room: child.outcome(room + 1), 10)
            assert child.outcome(room + 1)["ok"] is True, child.said
            child.send(signal.SIGKILL)
        await until(lambda: not any(backend.counts().values()), 20)
    finally:
        await offers.close()
        await backend.stop()

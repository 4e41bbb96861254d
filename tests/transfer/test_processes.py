"""Peers that are real processes: killed, stopped, woken, replaced under their address. A failure is
named within its time, late bytes never reach memory that was given back, the next room is fine."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from kit import rank_process as kit
from kit.rank_child import Child
from kit.wait import until

from kvplane.transfer import (
    GenerationMismatch,
    Metadata,
    PeerGone,
    Stalled,
    TransferError,
    TransferMetrics,
)
from kvplane.transfer.backends import tcp_payload
from kvplane.vocabulary import Generation

HELD_S = 30.0


class Decode:
    """A decode rank in this process that pulls from a child."""

    def __init__(self) -> None:
        self.metrics, self.memory = TransferMetrics(), kit.memory(2)
        self.released: list[int] = []

    async def start(self, port: int) -> Decode:
        self.backend = await kit.backend_of(self.memory, self.metrics)
        self.resolver = kit.OneRank(kit.Endpoint("127.0.0.1", port))
        self.puller = kit.puller_of(self.backend, self.metrics, self.resolver)
        return self

    def begin(self, room: int) -> asyncio.Task[Metadata]:
        return asyncio.create_task(kit.pull(self.puller, room, self.released.extend))

    async def moving(self) -> None:
        """Bytes are landing."""
        landings = self.backend._receiver._landings  # type: ignore[attr-defined]
        (landing,) = await until(lambda: list(landings.values()))
        await asyncio.wait_for(landing.moving.wait(), 10)

    async def given_back(self) -> None:
        await until(lambda: len(self.released) == kit.PAGES, 10, what="all pages given back")
        held = (self.puller, self.backend)
        await until(lambda: not any(any(one.counts().values()) for one in held))

    async def stop(self) -> None:
        await self.puller.close()
        await self.backend.stop()


@pytest.fixture
async def children() -> AsyncIterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        await child.stop()


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    made = Decode()
    yield made
    await made.stop()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set no page moves on this side: whoever is met then is in the middle."""
    opened = threading.Event()
    fill, send_all = tcp_payload._fill, tcp_payload._send_all

    def fills(sock: Any, view: memoryview, *more: Any) -> None:
        if len(view) >= kit.PAGE_BYTES:  # and no head or body
            opened.wait(HELD_S)
        fill(sock, view, *more)

    def sends(sock: Any, *more: Any) -> None:
        opened.wait(HELD_S)
        send_all(sock, *more)

    monkeypatch.setattr(tcp_payload, "_fill", fills)
    monkeypatch.setattr(tcp_payload, "_send_all", sends)
    yield opened
    opened.set()


async def prefill(children: list[Child], port: int = 0, generation: str = "p1") -> Child:
    children.append(Child("prefill", str(port), generation))
    return await children[-1].start()


async def answered(decode: Decode, child: Child, room: int) -> None:
    """A whole room goes well."""
    child.room(room)
    got = await asyncio.wait_for(decode.begin(room), 10)
    assert got.first_token == 7 and np.array_equal(decode.memory, kit.memory(1))


async def test_a_prefill_stopped_in_the_middle_is_named_and_its_late_bytes_never_land(
    children: list[Child], decode: Decode, gate: threading.Event
) -> None:
    """FR-TR-04 (c), FR-TR-11: the old one wakes up, writes, and is refused."""
    child = await prefill(children)
    await decode.start(child.port)
    pull = decode.begin(71)
    child.room(71)
    await decode.moving()
    child.send(signal.SIGSTOP)
    gate.set()
    with pytest.raises(Stalled, match=f"127.0.0.1:{child.port} stalled: nothing moved"):
        await asyncio.wait_for(pull, 5)
    await decode.given_back()
    decode.memory[:] = 0xEE  # the pages belong to others now
    child.send(signal.SIGCONT)
    await until(lambda: child.outcome(71), 10)
    assert child.outcome(71)["ok"] is False, "the woken one knows that it failed"
    assert (decode.memory == 0xEE).all(), "not one late byte"
    decode.released.clear()
    await answered(decode, child, 72)  # no restart of anybody


async def test_a_prefill_killed_in_the_middle_is_gone_at_once_and_its_successor_is_met(
    children: list[Child], decode: Decode, gate: threading.Event
) -> None:
    """FR-TR-04 (a), FR-TR-11: the same address, another life."""
    child = await prefill(children)
    await decode.start(child.port)
    decode.resolver.endpoint_.generation = Generation("p1")
    pull = decode.begin(71)
    child.room(71)
    await decode.moving()
    child.send(signal.SIGKILL)
    gate.set()
    with pytest.raises(PeerGone, match=f"127.0.0.1:{child.port} is gone"):
        await asyncio.wait_for(pull, 3)
    await decode.given_back()
    successor = await prefill(children, child.port, "p2")
    decode.released.clear()
    with pytest.raises(GenerationMismatch, match="this is generation p2, p1 was asked for"):
        await asyncio.wait_for(decode.begin(72), 5)
    await decode.given_back()
    decode.resolver.endpoint_.generation = Generation("p2")
    await answered(decode, successor, 73)


async def test_a_decode_stopped_in_the_middle_frees_the_prefill_and_believes_nothing_when_woken(
    children: list[Child], gate: threading.Event
) -> None:
    metrics = TransferMetrics()
    array = kit.memory(1)
    backend = await kit.backend_of(array, metrics)
    offers = kit.offers_of(backend, metrics, "p1")
    port = await offers.start("127.0.0.1")
    try:
        child = Child("decode", f"127.0.0.1:{port}")
        children.append(await child.start())
        child.room(71)
        await until(lambda: offers.counts()["rooms"])
        sent = asyncio.create_task(kit.deliver(offers, 71))
        await until(lambda: backend.counts()["sending"])
        child.send(signal.SIGSTOP)
        gate.set()
        with pytest.raises(TransferError):
            await asyncio.wait_for(sent, 6)
        await until(
            lambda: not any(offers.counts().values()) and not any(backend.counts().values())
        )
        child.send(signal.SIGCONT)
        await until(lambda: child.outcome(71), 10)
        assert child.outcome(71)["ok"] is False, child.said
        child.room(72)
        await asyncio.wait_for(kit.deliver(offers, 72), 10)
        await until(lambda: child.outcome(72), 10)
        assert child.outcome(72)["ok"] is True
    finally:
        await offers.close()
        await backend.stop()


async def test_a_decode_killed_in_the_middle_ends_the_delivery_at_once(
    children: list[Child], gate: threading.Event
) -> None:
    metrics = TransferMetrics()
    array = kit.memory(1)
    backend = await kit.backend_of(array, metrics)
    offers = kit.offers_of(backend, metrics, "p1")
    port = await offers.start("127.0.0.1")
    try:
        child = Child("decode", f"127.0.0.1:{port}")
        children.append(await child.start())
        child.room(71)
        await until(lambda: offers.counts()["rooms"])
        sent = asyncio.create_task(kit.deliver(offers, 71))
        await until(lambda: backend.counts()["sending"])
        child.send(signal.SIGKILL)
        gate.set()
        with pytest.raises(PeerGone):
            await asyncio.wait_for(sent, 3)
        await until(
            lambda: not any(offers.counts().values()) and not any(backend.counts().values())
        )
    finally:
        await offers.close()
        await backend.stop()

"""What these libraries are known for, and what our side of them promises nevertheless."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit import rank_process as kit
from kit.rank_child import Child
from kit.wait import until

from kvplane.transfer import (
    BACKENDS,
    Backend,
    NotAvailable,
    PeerGone,
    Refused,
    Region,
    Stalled,
    TransferMetrics,
    TransferSettings,
    must_exit_hard,
    region_of,
)
from kvplane.transfer.backends import Ticket
from kvplane.transfer.backends.onesided_plan import Reach, encode
from kvplane.vocabulary import Generation, Room

ITEMS = 4096
SETTINGS = TransferSettings(stall_s=2.0, fence_s=10.0)


async def rank(name: str, array: np.ndarray, settings: TransferSettings = SETTINGS) -> Backend:
    backend = BACKENDS[name](settings, TransferMetrics())
    await backend.start("127.0.0.1", [Region.of(array)])
    return backend


async def test_more_pieces_than_one_call_of_the_library_takes(name: str) -> None:
    """Mooncake refuses 2100 entries in one call; nothing of 4096 follows anything here."""
    random = np.random.default_rng(5)
    here, there = random.integers(0, 256, (ITEMS, 512), np.uint8), np.zeros((ITEMS, 512), np.uint8)
    prefill, decode = await rank(name, here), await rank(name, there)
    sources, pages = random.permutation(ITEMS), random.permutation(ITEMS)
    ticket = Ticket(1, Room(71), Generation("d1"), tuple(map(int, pages)), 64)
    try:
        landing = decode.landing(ticket, 20.0)
        peer = await prefill.connect(landing.offer, landing.ticket, Generation("d1"), 5.0)
        out = prefill.regions.out(list(map(int, sources)), ticket.pages)
        await prefill.write(peer, out, 20.0)
        assert np.array_equal(there[pages], here[sources])
        await prefill.close_peer(peer)
    finally:
        await prefill.stop()
        await decode.stop()


async def test_a_stopped_peer_costs_no_more_than_our_own_deadline(
    name: str, children: list[Child]
) -> None:
    """Its own patience is seconds (Mooncake) or endless (NIXL); others are served meanwhile."""
    here, there = kit.memory(1), kit.memory(2)
    backend = await kit.backend_of(here, TransferMetrics(), name)
    other = await kit.backend_of(there, TransferMetrics(), name)
    offers = kit.offers_of(backend, TransferMetrics(), "p1")
    port = await offers.start("127.0.0.1")
    try:
        children.append(Child("decode", f"127.0.0.1:{port}", backend=name))
        await children[-1].start()
        children[-1].room(71)
        await until(lambda: offers.counts()["rooms"])
        children[-1].send(signal.SIGSTOP)
        started = time.monotonic()
        sent = asyncio.create_task(kit.deliver(offers, 71, 0.5))
        ticket = Ticket(1, Room(72), Generation("d1"), (3, 4), 64)
        landing = other.landing(ticket, 20.0)
        peer = await backend.connect(landing.offer, landing.ticket, Generation("d1"), 5.0)
        await backend.write(peer, backend.regions.out([5, 6], [3, 4]), 5.0)
        assert np.array_equal(there[3:5], here[5:7])
        with pytest.raises(Exception, match=r"127\.0\.0\.1"):
            await sent
        assert time.monotonic() - started < 15, "the library's own patience is longer"
        await backend.close_peer(peer)
    finally:
        await offers.close()
        await backend.stop()
        await other.stop()


async def test_garbage_instead_of_an_offer_is_refused_or_gone(name: str) -> None:
    """Whatever a peer says of itself, it never takes this process with it."""
    prefill = await rank(name, np.ones((4, 64), np.uint8))
    decode = await rank(name, np.zeros((4, 64), np.uint8))
    try:
        landing = decode.landing(Ticket(1, Room(71), Generation("d1"), (1,), 64), 5.0)
        reach = landing.session.reach  # type: ignore[attr-defined]
        for wrong in (
            {"library": b""},
            {"library": b"garbage"},
            {"library": reach.library[: len(reach.library) // 2]},
            {"session": "nobody"},
            {"session": "127.0.0.1:1"},
        ):
            if name == "mooncake" and "library" in wrong:
                continue  # it needs no metadata
            with pytest.raises((Refused, PeerGone, Stalled)):
                await attempt(prefill, landing, replace_reach(reach, wrong))
    finally:
        await prefill.stop()
        await decode.stop()


def replace_reach(reach: Reach, change: dict[str, Any]) -> Reach:
    told = {field: getattr(reach, field) for field in ("session", "life", "spans", "library")}
    return Reach(**(told | change))


async def attempt(prefill: Backend, landing: Any, reach: Reach) -> None:
    offer = replace(landing.offer, blob=encode(reach))
    peer = await prefill.connect(offer, landing.ticket, Generation("d1"), 3.0)
    try:
        await prefill.write(peer, prefill.regions.out([1], [1]), 3.0)
    finally:
        await prefill.close_peer(peer)


PROGRAM = """
import asyncio, os, sys
import numpy as np
from kvplane.transfer import *
async def main():
    backend = BACKENDS[sys.argv[1]](TransferSettings(), TransferMetrics())
    await backend.start("127.0.0.1", [Region.of(np.zeros((4, 64), np.uint8))])
    await backend.stop()
asyncio.run(main())
if must_exit_hard():
    os._exit(7)
sys.exit(7)
"""


def test_a_process_that_did_as_told_ends_with_its_own_exit_code(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], timeout=60, check=False)
    assert done.returncode == 7


async def test_nixl_says_that_its_process_must_not_exit_by_itself(name: str) -> None:
    if name != "nixl":
        pytest.skip("only nixl crashes an interpreter that exits")
    backend = await rank(name, np.zeros((4, 64), np.uint8))
    await backend.stop()
    assert must_exit_hard()


async def test_nixl_refuses_transports_that_nothing_fences(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "nixl":
        pytest.skip("only UCX has transports that write by themselves")
    monkeypatch.setitem(os.environ, "UCX_TLS", "sm,tcp")
    with pytest.raises(NotAvailable, match="lets a peer write by cma, xpmem, knem"):
        await rank(name, np.zeros((4, 64), np.uint8))


async def test_memory_of_a_gpu_moves_directly(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no CUDA memory to move")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    here = torch.arange(1000, dtype=torch.float16, device="cuda").reshape(10, 100)
    there = torch.zeros_like(here)
    sides = []
    for tensor in (here, there):
        backend = BACKENDS[name](SETTINGS, TransferMetrics())
        try:
            await backend.start("127.0.0.1", [region_of(tensor)])
        except NotAvailable as error:
            pytest.skip(str(error))  # a build without CUDA
        sides.append(backend)
    prefill, decode = sides
    landing = decode.landing(Ticket(1, Room(71), Generation("d1"), (7, 8), 64), 5.0)
    peer = await prefill.connect(landing.offer, landing.ticket, Generation("d1"), 5.0)
    await prefill.write(peer, prefill.regions.out([1, 2], [7, 8]), 5.0)
    torch.cuda.synchronize()
    assert torch.equal(there[7:9], here[1:3]) and not there[:7].any()
    await prefill.stop()
    await decode.stop()

"""Resolver: few questions, short memory, and never an old port of an instance that came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from kit.clock import FakeClock
from kit.directory import Seat, rank, serving
from kit.peer import Call, peer
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.bootstrap import (
    BootstrapClient,
    BootstrapMetrics,
    Endpoint,
    NewLife,
    NoDirectory,
    NotRegistered,
    RankUnknown,
    Registration,
    Resolver,
    ResolverSettings,
    RoomRanks,
    Silent,
    Topology,
    fresh_session,
)
from kvplane.vocabulary import Generation, Room, Stage

A = "10.0.0.1:8998"
ONE = Topology(attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1)


@dataclass
class FakeClient:
    """A directory that the test restarts, breaks and holds."""

    life: str | None = "g1"
    port: int = 40000
    error: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def _answered(self, question: str) -> Generation | None:
        self.asked.append(question)
        life = self.life
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return None if life is None else Generation(life)

    async def topology(self, address: str, deadline_s: float | None = None) -> Any:
        return ONE, await self._answered(f"topology {address}")

    async def rank(
        self, address: str, dp: int, cp: int, tp: int, pp: int, deadline_s: float | None = None
    ) -> Endpoint:
        life = await self._answered(f"rank {address} {dp}{cp}{tp}{pp}")
        return Endpoint("10.0.0.1", self.port, life)

    async def ask_rooms(
        self,
        address: str,
        rooms: Iterable[int],
        wait_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> RoomRanks:
        asked = tuple(rooms)
        life = await self._answered(f"rooms {address}")
        return RoomRanks({Room(room): 1 for room in asked}, life)


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def resolver(fake: FakeClient, clock: FakeClock) -> AsyncIterator[Resolver]:
    made = Resolver(fake, clock, ResolverSettings(fresh_s=0.5, rooms_gap_s=0))  # type: ignore[arg-type]
    yield made
    await made.close()


async def test_a_hundred_rooms_ask_once(fake: FakeClient, resolver: Resolver) -> None:
    fake.gate.clear()
    waiting = [asyncio.create_task(resolver.topology(A)) for _ in range(100)]
    await until(lambda: fake.asked)
    fake.gate.set()
    found = await asyncio.gather(*waiting)
    assert fake.asked == [f"topology {A}"]
    assert len({id(one) for one in found}) == 1


async def test_a_waiter_that_leaves_takes_nobody_with_it(
    fake: FakeClient, resolver: Resolver
) -> None:
    fake.gate.clear()
    first, second = (asyncio.create_task(resolver.topology(A)) for _ in range(2))
    await until(lambda: fake.asked)
    first.cancel()
    await until(first.done)
    fake.gate.set()
    assert (await second).generation == "g1"


async def test_an_answer_is_believed_for_a_short_time_only(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    for wait, asked in ((0.0, 1), (0.4, 1), (0.2, 2)):
        clock.advance(wait)
        await resolver.topology(A)
        await resolver.endpoint(A, 0, 0, 0, 0)
        assert len(fake.asked) == 2 * asked


async def test_a_restart_is_noticed_before_an_old_port_is_used(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:  # FR-BS-03, the decode's side
    await resolver.topology(A)
    assert (await resolver.endpoint(A, 0, 0, 0, 0)).port == 40000
    fake.life, fake.port = "g2", 40001
    clock.advance(0.6)
    assert (await resolver.topology(A)).generation == "g2"
    found = await resolver.endpoint(A, 0, 0, 0, 0)
    assert (found.port, found.generation) == (40001, "g2")


async def test_a_rank_of_another_life_makes_the_topology_void(
    fake: FakeClient, resolver: Resolver
) -> None:
    await resolver.topology(A)
    fake.life = "g2"
    await resolver.endpoint(A, 0, 0, 0, 0)
    assert (await resolver.topology(A)).generation == "g2"


async def test_a_caller_that_expects_a_life_is_told_of_another(
    fake: FakeClient, resolver: Resolver
) -> None:
    fake.life = "g2"
    with pytest.raises(NewLife, match="is now g2, was g1"):
        await resolver.endpoint(A, 0, 0, 0, 0, expected=Generation("g1"))
    assert await resolver.endpoint(A, 0, 0, 0, 0, expected=Generation("g2"))


async def test_a_server_without_generations_is_asked_again_all_the_same(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    fake.life = None
    await resolver.topology(A)
    await resolver.endpoint(A, 0, 0, 0, 0)
    fake.port = 40001
    clock.advance(0.6)
    await resolver.topology(A)
    assert (await resolver.endpoint(A, 0, 0, 0, 0)).port == 40001


async def test_what_is_forgotten_is_asked_anew(fake: FakeClient, resolver: Resolver) -> None:
    await resolver.topology(A)
    resolver.forget(A)
    await resolver.topology(A)
    assert len(fake.asked) == 2


async def test_an_answer_that_was_out_when_its_address_was_forgotten_is_not_kept(
    fake: FakeClient, resolver: Resolver
) -> None:
    fake.gate.clear()
    early = asyncio.create_task(resolver.topology(A))
    await until(lambda: fake.asked)
    resolver.forget(A)
    fake.life = "g2"
    later = asyncio.create_task(resolver.topology(A))
    await until(lambda: len(fake.asked) == 2)
    fake.gate.set()
    assert ((await early).generation, (await later).generation) == ("g1", "g2")
    assert (await resolver.topology(A)).generation == "g2"


async def test_addresses_are_whole_texts(fake: FakeClient, resolver: Resolver) -> None:
    for address in ("h:9998", "h:99980"):
        await resolver.topology(address)
    resolver.forget("h:9998")
    await resolver.topology("h:99980")
    assert len(fake.asked) == 2


async def test_a_failed_address_is_left_alone_for_doubling_waits(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:  # FR-BS-08
    fake.error = Silent(A, 3.0)
    for _ in range(3000):  # 30 s of a hundred requests per second
        with pytest.raises(Silent):
            await resolver.topology(A)
        with pytest.raises(Silent):
            await resolver.endpoint(A, 0, 0, 0, 0)
        clock.advance(0.01)
    assert 6 <= len(fake.asked) <= 14
    fake.error = None
    clock.advance(10)
    await resolver.topology(A)
    fake.error = NoDirectory(A, "connection refused")
    clock.advance(1)
    with pytest.raises(NoDirectory):
        await resolver.topology(A)
    fake.error = None
    clock.advance(0.31)  # the first wait again, not the longest
    await resolver.topology(A)


async def test_an_address_that_says_no_at_once_is_asked_again_within_a_second(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:  # FR-BS-03: the first room after a long outage
    fake.error = NoDirectory(A, "connection refused")
    for _ in range(600):
        with pytest.raises(NoDirectory):
            await resolver.topology(A)
        clock.advance(0.1)
    fake.error = None
    clock.advance(1.0)
    assert (await resolver.topology(A)).generation == "g1"


async def test_rooms_asked_for_while_a_call_is_out_go_into_the_next_one(
    fake: FakeClient, resolver: Resolver
) -> None:
    fake.gate.clear()
    first = asyncio.create_task(resolver.dp_ranks(A, [Room(1)]))
    await until(lambda: fake.asked)
    others = [asyncio.create_task(resolver.dp_ranks(A, [Room(i), Room(9)])) for i in range(2, 9)]
    await asyncio.sleep(0)
    others[0].cancel()
    fake.gate.set()
    assert await first == {1: 1}
    assert await asyncio.gather(*others[1:]) == [{i: 1, 9: 1} for i in range(3, 9)]
    assert fake.asked == [f"rooms {A}"] * 2


async def test_a_failed_question_about_rooms_fails_all_who_waited_and_then_recovers(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    fake.gate.clear()
    waiting = [asyncio.create_task(resolver.dp_ranks(A, [Room(i)])) for i in range(1, 9)]
    await until(lambda: fake.asked)
    fake.error = Silent(A, 3.0)
    fake.gate.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in found} == {Silent}
    assert len(fake.asked) == 1
    fake.error = None
    clock.advance(1)
    assert await resolver.dp_ranks(A, [Room(5)]) == {5: 1}


async def test_what_is_over_is_told_once_with_the_life_and_the_reason(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    """FR-BS-03: the change signal; the generation changes exactly once. FR-TR-07"""
    told: list[tuple[str, Generation | None, str]] = []

    def broken(*one: object) -> None:
        raise RuntimeError("listener")

    undo = [resolver.watch(broken), resolver.watch(lambda *one: told.append(one))]
    await resolver.topology(A)
    await resolver.endpoint(A, 0, 0, 0, 0)
    fake.life, fake.port = "g2", 40001
    clock.advance(0.6)
    for _ in range(3):
        await resolver.endpoint(A, 0, 0, 0, 0)
        await resolver.topology(A)
        clock.advance(0.6)
    assert told == [(A, "g1", f"instance at {A} is now g2, was g1")]
    for one in undo:
        one()
    fake.life = "g3"
    clock.advance(0.6)
    await resolver.topology(A)
    assert len(told) == 1


async def test_an_answer_that_comes_late_from_a_life_that_is_over_changes_nothing(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    """FR-BS-10: the old server may still answer what it was asked before."""
    told: list[object] = []
    resolver.watch(lambda *one: told.append(one))
    await resolver.topology(A)
    fake.gate.clear()
    late = asyncio.create_task(resolver.endpoint(A, 0, 0, 0, 0))
    await until(lambda: len(fake.asked) == 2)
    clock.advance(0.6)
    resolver.answered(A, Generation("g2"), clock.now())  # as the heartbeat heard
    fake.life = "g2"
    fake.gate.set()
    with pytest.raises(NewLife, match="is now g2, was g1"):
        await late
    assert (await resolver.topology(A)).generation == "g2"
    with pytest.raises(NewLife):
        resolver.answered(A, Generation("g1"), clock.now() - 1)
    assert len(told) == 1


async def test_ranks_that_are_missing_after_all_were_in_are_another_life(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    """FR-TR-09: the directory came back empty; nobody is sent to its old ranks."""
    told: list[tuple[str, Generation | None, str]] = []
    resolver.watch(lambda *one: told.append(one))
    await resolver.topology(A)
    fake.error = NotRegistered(A, "Prefill server not fully registered yet (0 workers registered).")
    clock.advance(0.6)
    with pytest.raises(NotRegistered) as caught:
        await resolver.endpoint(A, 0, 0, 0, 0)
    assert caught.value.stage is Stage.REGISTER  # the diagnosis in between
    assert [one[:2] for one in told] == [(A, "g1")]
    state = resolver.states()[A]
    assert state.why.startswith(f"register: bootstrap server {A}: Prefill server not fully")
    fake.error = None
    clock.advance(1)
    assert await resolver.endpoint(A, 0, 0, 0, 0)


async def test_an_address_that_fails_is_asked_one_question_whatever_is_wanted(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    """FR-BS-08: no more than one probe is out per address."""
    fake.error = Silent(A, 3.0)
    with pytest.raises(Silent):
        await resolver.topology(A)
    clock.advance(1)
    fake.gate.clear()
    before = len(fake.asked)
    calls = [resolver.endpoint(A, 0, 0, tp, 0) for tp in range(8)]
    rooms = [resolver.dp_ranks(A, [Room(room)], wait_s=9) for room in range(8)]
    waiting = [asyncio.ensure_future(call) for call in (*calls, *rooms)]
    await until(lambda: len(fake.asked) > before)
    fake.gate.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in found} == {Silent}
    assert fake.asked[before:] == [f"topology {A}"]
    assert resolver.states()[A].attempts == 2


async def test_the_state_of_every_address_is_to_be_seen(
    fake: FakeClient, resolver: Resolver, clock: FakeClock
) -> None:
    """FR-TR-06, FR-BS-08"""
    await resolver.topology(A)
    fake.error = Silent("h:1", 3.0)
    with pytest.raises(Silent):
        await resolver.topology("h:1")
    fake.gate.clear()
    asking = asyncio.create_task(resolver.topology("h:2"))
    await until(lambda: len(fake.asked) == 3)
    states = resolver.states()
    assert {address: one.state for address, one in states.items()} == {
        A: "ok", "h:1": "waiting", "h:2": "asking",
    }  # fmt: skip
    assert (states[A].generation, states["h:1"].attempts) == ("g1", 1)
    asking.cancel()


async def test_one_silent_address_delays_no_other(fake: FakeClient, resolver: Resolver) -> None:
    fake.gate.clear()  # FR-BS-08
    stuck = asyncio.create_task(resolver.topology("10.0.0.2:8998"))
    await until(lambda: fake.asked)
    fake.gate = asyncio.Event()
    fake.gate.set()
    assert await asyncio.wait_for(resolver.topology(A), 10)
    stuck.cancel()


async def test_an_unknown_rank_says_nothing_of_its_directory(
    fake: FakeClient, resolver: Resolver
) -> None:
    fake.error = RankUnknown(A, "Bootstrap info not found")
    with pytest.raises(RankUnknown):
        await resolver.endpoint(A, 0, 0, 9, 0)
    fake.error = None
    assert await resolver.endpoint(A, 0, 0, 0, 0)


async def test_the_memory_of_addresses_is_bounded(fake: FakeClient, clock: FakeClock) -> None:
    resolver = Resolver(fake, clock, ResolverSettings(most_addresses=10))  # type: ignore[arg-type]
    for i in range(50):
        await resolver.topology(f"h{i}:1")
    assert len(resolver.states()) == 10
    await resolver.close()


async def test_outcomes_are_counted_by_stage(fake: FakeClient, clock: FakeClock) -> None:
    registry = CollectorRegistry()
    resolver = Resolver(fake, clock, metrics=BootstrapMetrics(registry))  # type: ignore[arg-type]
    await resolver.topology(A)
    fake.error = Silent(A, 3.0)
    with pytest.raises(Silent):
        await resolver.dp_ranks(A, [Room(1)])

    def counted(stage: str, outcome: str) -> float | None:
        labels = {"stage": stage, "outcome": outcome}
        return registry.get_sample_value("kvplane_bootstrap_resolutions_total", labels)

    assert (counted("resolve-topology", "ok"), counted("resolve-rank", "Silent")) == (1, 1)
    await resolver.close()


async def test_a_prefill_restarted_under_its_address_is_reached_on_its_new_ports(
    clock: FakeClock,
) -> None:
    """Everything real but the time: server, client, resolver."""
    async with aiohttp.ClientSession() as session:
        resolver = Resolver(BootstrapClient(session), clock)
        async with serving("first") as seat:
            await both(seat, 1, 2)
            first = await resolver.topology(seat.address)
            assert [await port_of(resolver, seat.address, tp) for tp in (0, 1)] == [1, 2]
            port = seat.port
        clock.advance(1)
        with pytest.raises(NoDirectory, match=str(port)):
            await resolver.topology(seat.address)
        async with serving("second", port=port) as seat:
            await both(seat, 3, 4)
            clock.advance(1)
            assert (await resolver.topology(seat.address)).generation != first.generation
            assert [await port_of(resolver, seat.address, tp) for tp in (0, 1)] == [3, 4]
        await resolver.close()


async def test_a_directory_that_came_back_empty_is_full_again_when_its_ranks_told_it_again(
    clock: FakeClock,
) -> None:
    """FR-TR-09: a new decode is told what is missing, then connects."""
    async with aiohttp.ClientSession() as session:
        client = BootstrapClient(session)
        told = Registration.parse(rank(generation="g1", rank_port=7))
        async with serving("first") as seat:
            await client.register(seat.address, told)
            port = seat.port
        async with serving("second", port=port) as seat:
            newcomer = Resolver(client, clock)
            with pytest.raises(NotRegistered, match="0 workers registered") as caught:
                await newcomer.topology(seat.address)
            assert caught.value.stage is Stage.REGISTER
            await client.register(seat.address, told)  # as members do with every heartbeat
            clock.advance(1)
            assert await port_of(newcomer, seat.address, 0) == 7
            await newcomer.close()


async def test_a_black_hole_beside_a_healthy_prefill_costs_the_healthy_one_nothing() -> None:
    """FR-BS-08: 50 requests/s to P1 and to P2, whose port accepts and stays silent."""
    settings = ResolverSettings(topology_s=0.3)

    async def swallow(call: Call) -> None:
        await call.closed()

    async def healthy(resolver: Resolver, address: str) -> float:
        began = time.perf_counter()
        await resolver.topology(address)
        await resolver.endpoint(address, 0, 0, 0, 0)
        return time.perf_counter() - began

    async with fresh_session() as session, serving() as seat, peer(swallow) as hole:
        await seat.put()
        resolver = Resolver(BootstrapClient(session), settings=settings)
        silent = hole.url.removeprefix("http://")
        most_out, took, failed = 0, [], []
        for _ in range(150):
            failed.append(asyncio.create_task(resolver.topology(silent)))
            took.append(await healthy(resolver, seat.address))
            most_out = max(most_out, hole.open)
            await asyncio.sleep(0.02)
        await asyncio.wait(failed)
        assert {type(one.exception()) for one in failed} == {Silent}
        assert most_out == 1
        assert hole.connections <= 6  # 0.3 s each, and waits of 0.25, 0.5, 1 ... between
        assert sorted(took)[int(len(took) * 0.95)] < 0.25  # never the silent one's time
        state = resolver.states()[silent]
        assert state.why.startswith("resolve-topology: ")
        assert "no answer within 0.3 s" in state.why
        await resolver.close()


async def both(seat: Seat, first: int, second: int) -> None:
    for tp, port in ((0, first), (1, second)):
        await seat.put(attn_tp_size=2, attn_tp_rank=tp, rank_port=port)


async def port_of(resolver: Resolver, address: str, tp: int) -> int:
    return (await resolver.endpoint(address, 0, 0, tp, 0)).port


class Gated:
    """A client whose answers are held back."""

    def __init__(self) -> None:
        self.asked, self.gate = 0, asyncio.Event()

    async def topology(self, address: str, deadline_s: float) -> Any:
        self.asked += 1
        await self.gate.wait()
        return Topology(1, 1, 1, 1), Generation("g")


async def test_an_answer_to_a_question_from_before_a_forget_is_not_kept(clock: FakeClock) -> None:
    """A connection to a rank failed meanwhile: what was asked before that may be as old."""
    client: Any = Gated()
    resolver = Resolver(client, clock)
    asking = asyncio.create_task(resolver.topology("h:1"))
    await until(lambda: client.asked == 1)
    resolver.forget("h:1")
    client.gate.set()
    await asyncio.gather(asking, return_exceptions=True)
    for _ in range(2):
        await resolver.topology("h:1")
    assert client.asked == 2
    await resolver.close()

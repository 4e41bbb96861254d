"""Heartbeat: decodes learn within seconds that a prefill died or was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from kit.clock import FakeClock
from kit.directory import Seat, serving
from kit.foreign import Foreign, foreign
from kit.forwarder import Forwarder, forwarding
from kit.peer import Call, peer
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.bootstrap import (
    BootstrapClient,
    BootstrapError,
    BootstrapMetrics,
    Heartbeat,
    NewLife,
    NoDirectory,
    Resolver,
    ResolverSettings,
    fresh_session,
)
from kvplane.vocabulary import Generation, Room

# A busy machine is no finding: only where somebody is silent it is not waited for so long.
SETTINGS = ResolverSettings(beat_wait_s=20.0, topology_s=20.0, rank_s=20.0)
Told = tuple[str, Generation | None, str]


@dataclass
class Decode:
    """A resolver with its heartbeat, in time that the test moves."""

    resolver: Resolver
    heartbeat: Heartbeat
    clock: FakeClock
    registry: CollectorRegistry
    told: list[Told] = field(default_factory=list)

    async def beats(self, count: int = 1) -> None:
        """So many rounds, each to its end."""
        for _ in range(count):
            self.clock.advance(SETTINGS.beat_s)
            self.heartbeat.round()
            await until(lambda: not self.heartbeat._out)

    async def ports(self, address: str, *tp_ranks: int) -> list[int]:
        await self.resolver.topology(address)
        return [(await self.resolver.endpoint(address, 0, 0, tp, 0)).port for tp in tp_ranks]

    def counted(self, outcome: str) -> float:
        name = "kvplane_bootstrap_beats_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


@asynccontextmanager
async def deciding(settings: ResolverSettings = SETTINGS) -> AsyncIterator[Decode]:
    clock, registry = FakeClock(), CollectorRegistry()
    metrics = BootstrapMetrics(registry)
    async with fresh_session() as session:
        client = BootstrapClient(session)
        resolver = Resolver(client, clock, settings, metrics)
        heartbeat = Heartbeat(resolver, client, clock, settings, metrics)
        made = Decode(resolver, heartbeat, clock, registry)
        resolver.watch(lambda *told: made.told.append(told))
        yield made
        await heartbeat.stop()
        await resolver.close()


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with deciding() as made:
        yield made


async def both(seat: Seat, first: int, second: int) -> None:
    for tp, port in ((0, first), (1, second)):
        await seat.put(attn_tp_size=2, attn_tp_rank=tp, rank_port=port)


async def test_a_living_prefill_is_left_alone(decode: Decode, seat: Seat) -> None:
    await both(seat, 1, 2)
    assert await decode.ports(seat.address, 0, 1) == [1, 2]
    await decode.beats(5)
    assert (decode.told, decode.counted("ok")) == ([], 5)


async def test_a_killed_prefill_is_told_within_two_beats_and_its_replacement_is_clean(
    decode: Decode,
) -> None:
    """FR-TR-07: no replacement for a minute, then one at the same address with a new id."""
    async with serving("first") as seat:
        await both(seat, 1, 2)
        await decode.ports(seat.address, 0, 1)
        life, address, port = seat.directory.generation, seat.address, seat.port
    await decode.beats(2)
    [(where, gone, why)] = decode.told
    assert (where, gone) == (address, life)
    assert why == f"no bootstrap server at {address}: connection refused"
    await decode.beats(30)
    assert len(decode.told) == 1  # said once, and the dead are not beaten
    state = decode.resolver.states()[address]
    assert (state.state, state.why) == ("failing", f"register: {why}")
    with pytest.raises(NoDirectory):
        await decode.resolver.topology(address)
    async with serving("second", port=port) as seat:
        await both(seat, 3, 4)
        decode.clock.advance(1)
        assert await decode.ports(address, 0, 1) == [3, 4]
        await decode.beats(3)
        assert len(decode.told) == 1
        assert decode.resolver.states()[address].state == "ok"


async def test_one_missed_beat_is_no_death(decode: Decode) -> None:
    """FR-TR-06: a blip marks nobody dead; any answer ends the row."""
    async with foreign(1) as other:
        await decode.ports(other.address, 0)
        for health in (200, 500, 200, 500, 200):
            other.health = health
            await decode.beats(1)
        assert (decode.told, decode.counted("missed")) == ([], 2)
        other.health = 500
        await decode.beats(2)
        assert "status 500" in decode.told[0][2]
        other.health = 200
        decode.clock.advance(1)
        assert await decode.ports(other.address, 0) == [1]  # used again after a time


async def swapped(decode: Decode, old: Seat | Foreign, new: Seat | Foreign, way: Forwarder) -> None:
    """FR-BS-10: the address never goes down, the old server lives on for who is connected."""
    assert await decode.ports(way.address, 0, 1) == [1, 2]
    await decode.beats(2)
    assert decode.told == []
    reader, writer = await asyncio.open_connection("127.0.0.1", way.port)  # open since before
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    way.target = port_of(new)
    await decode.beats(1)
    assert [(where, life) for where, life, _ in decode.told] == [(way.address, life_of(old))]
    decode.clock.advance(0.6)
    for _ in range(5):  # never an old port again, and no going back and forth
        assert await decode.ports(way.address, 0, 1) == [3, 4]
        await decode.beats(1)
    assert len(decode.told) == 1
    writer.close()
    await writer.wait_closed()


def port_of(server: Seat | Foreign) -> int:
    return server.port if isinstance(server, Seat) else server.peer.port


def life_of(server: Seat | Foreign) -> Generation | None:
    return server.directory.generation if isinstance(server, Seat) else None


async def test_a_replacement_behind_an_address_that_never_goes_down_is_noticed(
    decode: Decode,
) -> None:
    """FR-BS-10, FR-BS-03"""
    async with serving("old") as old, serving("new") as new, forwarding(old.port) as way:
        await both(old, 1, 2)
        await both(new, 3, 4)
        await swapped(decode, old, new, way)
        assert "is now" in decode.told[0][2]


async def test_the_same_where_the_server_tells_no_generation(decode: Decode) -> None:
    """FR-BS-10, FR-BS-03: SGLang's own server; the table tells."""
    async with foreign(1, 2) as old, foreign(3, 4) as new, forwarding(old.peer.port) as way:
        await swapped(decode, old, new, way)
        assert decode.told[0][2].endswith("was replaced: it tells another table")
        assert decode.counted("changed") == 1


async def test_a_switch_between_a_server_of_ours_and_sglangs_is_another_life(
    decode: Decode,
) -> None:
    async with serving("ours") as ours, foreign(3, 4) as other, forwarding(ours.port) as way:
        await both(ours, 1, 2)
        await swapped(decode, ours, other, way)


@pytest.mark.parametrize("change", ["ports", "page size", "incomplete", "smaller"])
async def test_any_change_of_a_table_without_generation_is_noticed(
    decode: Decode, change: str
) -> None:
    """FR-BS-03: SGLang's prefill restarted under its address, at any point of its start."""
    async with foreign(1, 2) as other:
        assert await decode.ports(other.address, 0, 1) == [1, 2]
        if change == "ports":
            other.ports[1, 0] = 7
        elif change == "page size":
            other.page_size = 32
        elif change == "smaller":
            del other.ports[1, 0]
        else:
            other.complete = False
        await decode.beats(1)
        assert [life for _, life, _ in decode.told] == [None]
        other.complete, other.ports[1, 0] = True, 8
        decode.clock.advance(2)
        assert await decode.ports(other.address, 0, 1) == [1, 8]


async def test_a_server_without_a_health_route_lives_all_the_same(decode: Decode) -> None:
    async with foreign(1) as other:
        other.health = 404
        await decode.ports(other.address, 0)
        await decode.beats(4)
        assert decode.told == []
        other.ports[0, 0] = 5
        await decode.beats(1)
        assert len(decode.told) == 1


async def test_one_beat_is_out_per_address_and_a_silent_one_delays_no_other(seat: Seat) -> None:
    """FR-BS-08"""
    await seat.put()
    silent = asyncio.Event()
    server: dict[str, Foreign] = {}

    async def script(call: Call) -> None:
        if silent.is_set():
            await call.closed()
        else:
            await server["f"].serve(call)

    server["f"] = Foreign({(0, 0): 1})
    async with peer(script) as other, deciding(replace(SETTINGS, beat_wait_s=1.0)) as decode:
        address = other.url.removeprefix("http://")
        await decode.ports(address, 0)
        await decode.ports(seat.address, 0)
        silent.set()
        before = other.connections
        for _ in range(50):
            decode.heartbeat.round()
            await asyncio.sleep(0)
        await until(lambda: decode.counted("ok") >= 1)
        assert other.connections - before <= 1
        await until(lambda: not decode.heartbeat._out)
        await decode.beats(1)
    [(where, _, why)] = decode.told
    assert where == address
    assert why == f"bootstrap server {address}: no answer within 1.0 s"


async def test_an_address_nobody_uses_is_no_longer_beaten(decode: Decode, seat: Seat) -> None:
    await seat.put()
    await decode.ports(seat.address, 0)
    await decode.beats(29)
    assert decode.counted("ok") == 29
    decode.clock.advance(SETTINGS.idle_s)
    await decode.beats(5)
    assert decode.counted("ok") == 29
    await decode.ports(seat.address, 0)
    await decode.beats(1)
    assert decode.counted("ok") == 30


async def test_an_address_that_never_answered_is_not_beaten(decode: Decode) -> None:
    """FR-BS-08: no probe beside the one that somebody waits for."""
    with pytest.raises(BootstrapError):
        await decode.resolver.topology("127.0.0.1:1")
    await decode.beats(3)
    assert decode.counted("missed") == 0


async def test_beats_that_are_out_are_bounded_and_everybody_gets_a_turn() -> None:
    settings = ResolverSettings(most_beats=2)
    async with deciding(settings) as decode, foreign(1) as one, foreign(1) as two, foreign(1) as x:
        addresses = [server.address for server in (one, two, x)]
        for address in addresses:
            await decode.ports(address, 0)
        asked = [server.peer.connections for server in (one, two, x)]
        await decode.beats(3)
        assert decode.counted("skipped") == 3
        now = [server.peer.connections for server in (one, two, x)]
        assert all(later - before >= 3 for later, before in zip(now, asked, strict=True))


async def test_texts_are_whole_addresses(decode: Decode, clock: FakeClock) -> None:
    """FR-BS-03: h:9998 dies, h:99980 stays."""

    class Client:
        async def health(self, address: str, deadline_s: float) -> Generation:
            if address == "h:9998":
                raise NoDirectory(address, "connection refused")
            return Generation("g")

        async def topology(self, address: str, deadline_s: float) -> object:
            return None, Generation("g")

    client = Client()
    resolver = Resolver(client, clock)  # type: ignore[arg-type]
    heartbeat = Heartbeat(resolver, client, clock)  # type: ignore[arg-type]
    told: list[Told] = []
    resolver.watch(lambda *one: told.append(one))
    for address in ("h:9998", "h:99980"):
        await resolver.topology(address)
    for _ in range(3):
        heartbeat.round()
        await until(lambda: not heartbeat._out)
    assert [where for where, _, _ in told] == ["h:9998"]
    assert resolver.lately() == ["h:99980"]
    assert resolver.states()["h:99980"].state == "ok"


async def test_who_waits_for_a_room_learns_that_its_prefill_was_replaced(decode: Decode) -> None:
    """FR-BS-10: the old server would keep the question for long."""
    old_one, new_one = serving("old", metrics=True), serving("new")
    async with old_one as old, new_one as new, forwarding(old.port) as way:
        await old.put()
        await new.put()
        await decode.ports(way.address, 0)
        waiting = asyncio.create_task(decode.resolver.dp_ranks(way.address, [Room(5)], wait_s=60))

        def kept() -> float | None:
            decode.clock.advance(0.01)
            return old.registry.get_sample_value("kvplane_bootstrap_polls_waiting")

        await until(kept)
        way.target = new.port
        await decode.beats(1)
        with pytest.raises(NewLife, match="is now"):
            await waiting
        await until(lambda: not kept())  # and the old server is not left with the question


async def test_it_beats_by_itself_until_it_is_stopped(decode: Decode, seat: Seat) -> None:
    await seat.put()
    await decode.ports(seat.address, 0)
    await decode.heartbeat.start()
    for count in (1, 2, 3):
        await until(lambda: decode.counted("ok") == count)  # noqa: B023
        await until(decode.clock.sleeping)
        decode.clock.advance(SETTINGS.beat_s)
    await decode.heartbeat.stop()
    await decode.heartbeat.stop()

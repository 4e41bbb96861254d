"""pull() through the real bootstrap server and resolver: register, resolve, restart, recover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from kit.wait import until

from kvplane.bootstrap import (
    Address,
    BootstrapClient,
    Directory,
    Facts,
    Place,
    Registration,
    Resolver,
    RoomTable,
    bootstrap_app,
)
from kvplane.doors import Server
from kvplane.runtime import SystemClock
from kvplane.transfer import PeerGone, Unresolved, resolve
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Stage

FOLLOWS = "follow_bootstrap_room"


class Boot:
    """A directory on a port, and its client."""

    def __init__(self, server: Server, client: BootstrapClient, app: Any, rooms: RoomTable) -> None:
        self.server, self.client = server, client
        self.polls, self.rooms = app.polls, rooms
        self.address = f"127.0.0.1:{server.port}"
        self.resolver = Resolver(client)

    async def register(
        self, port: int, generation: str, dp: tuple[int, int] = (0, 1), method: str = FOLLOWS
    ) -> None:
        """`dp`: its rank and their number."""
        place, where = Place(dp=dp[0], cp=0, tp=0, pp=0), Address("127.0.0.1", port)
        facts = Facts(dp=dp[1], cp=1, tp=1, pp=1, load_balance_method=method)
        one = Registration(place, where, facts, Generation(generation))
        await self.client.register(self.address, one)

    def use(self, rig: Any) -> None:
        """Pulls of this rig resolve here."""
        rig.puller._resolver = self.resolver
        rig.triple = lambda room: BootstrapTriple("127.0.0.1", self.server.port, Room(room))


@pytest.fixture
async def boot() -> AsyncIterator[Boot]:
    rooms = RoomTable()
    app = bootstrap_app(Directory(Generation("b1")), rooms, SystemClock())
    server = Server(app, "127.0.0.1", 0, "bootstrap")
    await server.start()
    async with aiohttp.ClientSession() as session:
        made = Boot(server, BootstrapClient(session), app, rooms)
        yield made
        await made.resolver.close()
    await server.stop()


async def test_a_registered_prefill_is_found_and_delivers(rig, boot: Boot) -> None:
    await boot.register(rig.resolver.endpoints[0].port, "p1")
    boot.use(rig)
    metadata, delivered = await rig.both(71, [1, 2], [3, 4])
    assert delivered is None and metadata.generation == "p1"
    assert rig.arrived([1, 2], [3, 4])
    await rig.recovers()


async def test_a_prefill_that_never_registered_is_said_to_be_missing(rig, boot: Boot) -> None:
    boot.use(rig)
    with pytest.raises(Unresolved, match=boot.address) as caught:
        await rig.pull(71, [1])
    assert caught.value.stage is Stage.REGISTER
    assert rig.stages(71, "decode") == {"resolve-topology": "failed"}


async def test_a_bootstrap_server_that_is_not_there_is_named(rig, boot: Boot) -> None:
    boot.use(rig)
    await boot.server.stop()
    with pytest.raises(Unresolved, match=boot.address) as caught:
        await rig.pull(71, [1])
    assert caught.value.stage is not Stage.VERIFY
    assert rig.released == [(1,)]


async def test_a_restarted_prefill_is_reached_on_its_new_port(make_rig, boot: Boot) -> None:
    old, new = await make_rig(), await make_rig(generation="p2")
    boot.use(old)
    await boot.register(old.resolver.endpoints[0].port, "p1")
    await asyncio.gather(old.pull(71, [1]), old.deliver(71, [2]))
    await old.offers.close()
    with pytest.raises(PeerGone) as caught:
        await old.pull(72, [1])
    assert caught.value.stage is Stage.CONNECT
    await boot.register(new.resolver.endpoints[0].port, "p2")
    metadata, _ = await asyncio.gather(old.pull(73, [1]), new.deliver(73, [5]))
    assert metadata.generation == "p2"
    assert old.page(old.decode_memory, 1) == new.page(new.prefill_memory, 5)


async def test_a_room_whose_dp_rank_is_told_late_is_waited_for_at_the_directory(
    make_rig, boot: Boot
) -> None:
    ranks = [await make_rig(), await make_rig()]
    for dp, rank in enumerate(ranks):
        port = rank.resolver.endpoints[0].port
        await boot.register(port, "p1", (dp, 2), "round_robin")
    decode, given = ranks[0], ranks[1]
    boot.use(decode)
    room = 72  # would be rank 0's, were the rank computed from it
    pulled = asyncio.create_task(decode.pull(room, [1]))
    await until(lambda: len(boot.polls) == 1, 5, what="the question waits at the directory")
    assert not pulled.done() and len(boot.rooms) == 0
    await boot.client.register_dp_rank(boot.address, room, 1)
    metadata, _ = await asyncio.gather(pulled, given.deliver(room, [2]))
    assert metadata.room == room
    assert decode.page(decode.decode_memory, 1) == given.page(given.prefill_memory, 2)
    assert len(boot.polls) == 0
    assert await boot.client.forget_rooms(boot.address, [room]) == 1
    assert len(boot.rooms) == 0


async def test_a_room_that_no_rank_ever_gets_fails_in_time_and_by_name(
    rig, boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "ANSWER_S", 1.0)  # also on a busy machine
    for dp in (0, 1):
        await boot.register(rig.resolver.endpoints[0].port + dp, "p1", (dp, 2), "total_tokens")
    boot.use(rig)
    with pytest.raises(Unresolved, match="dp rank of room 72 is not known") as caught:
        await rig.pull(72, [1], deadline_s=2.5)
    assert caught.value.stage is Stage.RESOLVE_RANK
    assert rig.stages(72, "decode")["resolve-rank"] == "failed"
    assert rig.released == [(1,)]

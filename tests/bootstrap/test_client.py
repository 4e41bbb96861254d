"""Client: a directory that is there, late, silent, broken or something else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from kit.clock import FakeClock
from kit.directory import Seat, rank, serving
from kit.peer import answer, peer, replies
from kit.ports import free_port
from kit.wait import until

from kvplane.bootstrap import (
    BadAddress,
    BadAnswer,
    BootstrapClient,
    BootstrapError,
    ClientSettings,
    NoDirectory,
    NotRegistered,
    RankUnknown,
    Refused,
    Registration,
    RoomRanks,
    Silent,
    fresh_session,
)
from kvplane.vocabulary import Room, Stage

RANK = Registration.parse(rank(rank_ip="10.0.0.9", rank_port=7, generation="g1"))
QUICK = ClientSettings(first_wait_s=0.02, most_wait_s=0.05)


@pytest.fixture
async def client() -> AsyncIterator[BootstrapClient]:
    async with fresh_session() as session:
        yield BootstrapClient(session, QUICK)


async def test_what_one_registers_another_finds(client: BootstrapClient, seat: Seat) -> None:
    assert await client.register(seat.address, RANK) == "g1"
    topology, life = await client.topology(f"http://{seat.address}")
    assert (topology.page_size, life) == (64, "g1")
    found = await client.rank(seat.address, 0, 0, 0, 0)
    assert (found.host, found.port, found.generation) == ("10.0.0.9", 7, "g1")
    assert await client.health(seat.address) == "g1"


async def test_rooms_go_there_and_back_and_away(client: BootstrapClient, seat: Seat) -> None:
    await client.register_dp_rank(seat.address, 2**63 - 1, 3)
    assert await client.dp_ranks(seat.address, [2**63 - 1, 5]) == {2**63 - 1: 3}
    assert await client.forget_rooms(seat.address, [2**63 - 1, 5]) == 1
    assert await client.dp_ranks(seat.address, [2**63 - 1, 5]) == {}


async def test_a_question_for_rooms_may_wait_until_they_are_told(
    client: BootstrapClient, seat: Seat
) -> None:
    asking = asyncio.create_task(client.ask_rooms(seat.address, [7, 8], wait_s=20.0))
    await client.register_dp_rank(seat.address, 7, 1)
    assert not asking.done()
    await client.register_dp_rank(seat.address, 8, 0)
    assert await asking == RoomRanks({Room(7): 1, Room(8): 0}, seat.directory.generation, True)
    known = await client.ask_rooms(seat.address, [7], wait_s=0.9)  # less than one second is none
    assert (known.ranks, known.waited) == ({7: 1}, False)


async def test_a_server_that_cannot_wait_or_forget_is_no_failure(client: BootstrapClient) -> None:
    """SGLang's own answers a query at once and knows no /forget_rooms."""
    async with peer(replies(answer(b'{"7": 1}'))) as other:
        assert await client.ask_rooms(other.url, [7, 8], wait_s=20) == RoomRanks({Room(7): 1})
    async with peer(replies(answer(b"404: Not Found", 404))) as other:
        assert await client.forget_rooms(other.url, [7]) == 0
    async with peer(replies(answer(b'{"forgotten": null}'))) as other:
        with pytest.raises(BadAnswer, match="forgotten"):
            await client.forget_rooms(other.url, [7])


async def test_a_rank_registers_before_its_directory_listens(clock: FakeClock) -> None:
    """FR-BS-02, first run: the directory listens 2 s after the first PUT, on the usual schedule."""
    port = free_port()
    async with fresh_session() as session:
        client = BootstrapClient(session, clock=clock)
        began = clock.now()
        telling = asyncio.create_task(client.register(f"127.0.0.1:{port}", RANK))
        while clock.now() < began + 2:
            await until(clock.sleeping)  # refused, and waiting for the next try
            clock.advance(0.1)
        assert not telling.done()
        async with serving(port=port) as seat:

            async def told() -> bool:
                if clock.sleeping():  # while it asks, however long that takes here, no time passes
                    clock.advance(0.1)
                return telling.done()

            await until(told)
            assert await telling == "g1"
            assert clock.now() - began < 10
            assert seat.directory.complete(seat.clock.now())


async def test_a_directory_that_never_comes_is_named(client: BootstrapClient) -> None:
    port = free_port()
    for host in ("127.0.0.1", "localhost"):  # the second may have several addresses
        await _is_named(client, f"{host}:{port}")


async def _is_named(client: BootstrapClient, address: str) -> None:  # FR-BS-02, second run
    calls: list[Callable[[], object]] = [
        lambda: client.register(address, RANK, deadline_s=0.1),
        lambda: client.topology(address),
        lambda: client.rank(address, 0, 0, 0, 0),
    ]
    for call in calls:
        with pytest.raises(NoDirectory, match=address) as caught:
            await call()  # type: ignore[misc]
        assert caught.value.stage is Stage.REGISTER
        assert str(caught.value) == f"no bootstrap server at {address}: connection refused"


async def test_a_refusal_is_not_tried_again(client: BootstrapClient, seat: Seat) -> None:
    await client.register(seat.address, RANK)
    later = Registration.parse(rank(generation="g2"))
    await client.register(seat.address, later)
    version = seat.directory.version
    with pytest.raises(Refused, match=r"409.*g1 was replaced by g2"):
        await client.register(seat.address, RANK, deadline_s=30)
    assert seat.directory.version == version


async def test_missing_ranks_and_unknown_ranks_are_two_things(
    client: BootstrapClient, seat: Seat
) -> None:
    with pytest.raises(NotRegistered, match="0 workers registered") as missing:
        await client.topology(seat.address)
    assert missing.value.stage is Stage.REGISTER
    await client.register(seat.address, RANK)
    with pytest.raises(RankUnknown, match="tp_rank=5") as unknown:
        await client.rank(seat.address, 0, 0, 5, 0)
    assert unknown.value.stage is Stage.RESOLVE_RANK


@contextlib.asynccontextmanager
async def hole() -> AsyncIterator[str]:
    """Accepts and never answers."""
    gone = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        gone.set()
        server.close()
        await server.wait_closed()


async def test_a_directory_that_accepts_and_never_answers_costs_its_deadline_only(
    client: BootstrapClient,
) -> None:  # FR-BS-08
    async with hole() as address:
        with pytest.raises(Silent, match=r"no answer within 0\.1 s") as caught:
            await client.topology(address, deadline_s=0.1)
        assert caught.value.stage is Stage.RESOLVE_TOPOLOGY


@pytest.mark.parametrize(("body", "status", "why"), [
    (b"<html>", 200, "no JSON"), (b"[]", 200, "answer \\[\\]"), (b"{}", 200, "attn_tp_size"),
    (b"oops", 500, "status 500: oops"), (b"", 302, "status 302"),
    (b"x" * 2_000_000, 200, "more than"),
    (b"[" * 100_000, 200, "no JSON"),
])  # fmt: skip
async def test_something_else_at_the_address_is_told_as_such(
    client: BootstrapClient, body: bytes, status: int, why: str
) -> None:
    async with peer(replies(answer(body, status))) as other:
        with pytest.raises(BadAnswer, match=why):
            await client.topology(other.url)


@pytest.mark.parametrize("body", [
    b'{"rank_ip": "0.0.0", "rank_port": 0}', b'{"rank_ip": "a b", "rank_port": 1}',
    b'{"rank_ip": null}', b'{"rank_ip": "h"}', b"7",
])  # fmt: skip
async def test_a_rank_nobody_can_reach_is_no_answer(client: BootstrapClient, body: bytes) -> None:
    async with peer(replies(answer(body))) as other:
        with pytest.raises(BadAnswer):
            await client.rank(other.url, 0, 0, 0, 0)


async def test_nobody_is_sent_elsewhere(client: BootstrapClient, seat: Seat) -> None:
    await client.register(seat.address, RANK)
    there = f"location: http://{seat.address}/health\r\n".encode()
    async with peer(replies(answer(b"", 302, there))) as other:
        with pytest.raises(BadAnswer, match="status 302"):
            await client.health(other.url)


async def test_an_answer_of_sglangs_own_server_has_no_generation(client: BootstrapClient) -> None:
    async with peer(replies(answer(b'{"rank_ip": "[::1]", "rank_port": 7}'))) as other:
        found = await client.rank(other.url, 0, 0, 0, 0)
    assert (found.host, found.port, found.generation) == ("::1", 7, None)


async def test_a_text_that_is_no_address_fails_before_any_call(client: BootstrapClient) -> None:
    with pytest.raises(BadAddress):
        await client.topology("a:b:c")


async def test_a_caller_that_leaves_stops_registering(client: BootstrapClient) -> None:
    telling = asyncio.create_task(client.register(f"127.0.0.1:{free_port()}", RANK))
    await asyncio.sleep(0.05)
    telling.cancel()
    await until(telling.done)
    assert telling.cancelled()


def test_every_error_is_ours() -> None:
    for error in (BadAddress, BadAnswer, NoDirectory, NotRegistered, RankUnknown, Refused, Silent):
        assert issubclass(error, BootstrapError)

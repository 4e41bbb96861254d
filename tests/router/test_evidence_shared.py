"""Shared evidence: any gateway tells of a room for a while; and nobody waits for the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from kit.clock import FakeClock
from kit.durable import durable
from kit.wait import until

from kvplane.index import Lasting, StoreDown
from kvplane.router.evidence import Ledger, Meeting
from kvplane.router.evidence_shared import MOST_BYTES, MOST_WAITING, SharedEvidence
from kvplane.router.remembered import Party, Why
from kvplane.runtime import running
from kvplane.vocabulary import Room, Stage, StageRecord


def meeting(number: int, request: str = "r") -> Meeting:
    pair = Party("p1"), Party("d1")
    return Meeting(request, 1, "/generate", "tiny", (Room(number),), *pair, Why())


class Board:
    """One gateway's ledger over a store, and its time."""

    def __init__(self, texts: object, lifetime_s: int = 60) -> None:
        self.clock, self.dropped = FakeClock(), 0
        self.ledger = Ledger(self.clock)
        self.shared = SharedEvidence(
            self.ledger,
            texts,
            self.clock,
            lifetime_s,
            self._dropped,  # type: ignore[arg-type]
        )

    def _dropped(self, count: int) -> None:
        self.dropped += count

    def served(self, number: int, request: str = "r", outcome: str = "ok") -> None:
        one = self.ledger.open(meeting(number, request))
        self.ledger.record(StageRecord(Room(number), Stage.VERIFY, "ok", 0.1, "", "d1", 1.0))
        self.ledger.close(one, outcome, {"message": "why"} if outcome == "failed" else None)

    async def passes(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            await asyncio.sleep(0)
            self.clock.advance(0.5)
            await asyncio.sleep(0)


@pytest.fixture
async def texts(redis_url: str, redis_prefix: str) -> AsyncIterator[Lasting]:
    made = Lasting(redis_url, redis_prefix)
    yield made
    await made.close()


async def test_another_gateway_shows_the_same_of_a_room_and_of_its_request(texts: Lasting) -> None:
    here, there = Board(texts), Board(texts)
    async with running([here.shared, there.shared]):
        here.served(71)
        here.served(2**63 - 1, outcome="failed")

        async def known() -> bool:
            await here.passes(1)
            return await there.shared.room(Room(71)) is not None

        await until(known)
        for number in (71, 2**63 - 1):
            assert await there.shared.room(Room(number)) == here.ledger.room(Room(number))
        assert await there.shared.request("r") == here.ledger.request("r")
        assert await there.shared.room(Room(5)) is None
        assert await there.shared.request("nobody's") is None
    assert here.dropped == there.dropped == 0


async def _told(board: Board, reader: Board, *rooms: int) -> bool:
    await board.passes(1)
    return all([await reader.shared.room(Room(room)) is not None for room in rooms])


async def test_a_room_is_told_of_though_its_request_id_came_again_at_another_gateway(
    texts: Lasting,
) -> None:
    """As a client does that tries again, or one that uses one id for all it asks."""
    here, there, third = Board(texts), Board(texts), Board(texts)
    async with running([here.shared, there.shared]):
        here.served(1, outcome="failed")
        await until(lambda: _told(here, third, 1))
        there.served(2)
        await until(lambda: _told(there, third, 2))
        assert await third.shared.room(Room(1)) == here.ledger.room(Room(1))
        assert await third.shared.request("r") == there.ledger.request("r")


async def test_a_store_that_goes_away_meanwhile_is_waited_for_once_and_not_per_attempt() -> None:
    class Going:
        async def get(self, name: str) -> bytes:
            if name.startswith("r:"):
                asked.append(name)
                await away.wait()
                raise TimeoutError
            return (
                b'{"request_id": "r", "outcome": "ok", "attempts": ["1", "2", {"rooms": []}, "3"]}'
            )

    asked, away = list[str](), asyncio.Event()
    reading = asyncio.create_task(Board(Going()).shared.request("r"))
    await until(lambda: len(asked) == 3)
    away.set()
    assert await reading == {"request_id": "r", "outcome": "ok", "attempts": [{"rooms": []}]}


async def test_each_room_of_a_list_and_an_attempt_without_rooms_are_told_of(
    texts: Lasting,
) -> None:
    here, there = Board(texts), Board(texts)
    async with running([here.shared]):
        listed = meeting(1)
        listed.rooms = (Room(1), Room(2), Room(3))
        alone = meeting(9)
        alone.rooms = ()
        for one in (listed, alone):
            here.ledger.close(here.ledger.open(one), "ok")
        await until(lambda: _told(here, there, 1, 2, 3))
        for number in (1, 2, 3):
            assert await there.shared.room(Room(number)) == here.ledger.room(Room(number))
        assert await there.shared.request("r") == here.ledger.request("r")


def test_one_id_for_very_many_requests_costs_no_more_than_many_ids() -> None:
    board, many = Board(Stuffed()), 3000
    for number in range(1, many + 1):
        board.served(number)
    board.clock.advance(9)
    written = board.shared._due()
    while more := board.shared._due():
        written += more
    assert board.dropped == 0
    assert {name for name, _ in written} == {"q:r", *(f"r:{n}" for n in range(1, many + 1))}
    assert max(len(text) for _, text in written) < 8 * 1024


async def test_it_is_forgotten_when_its_lifetime_is_over(texts: Lasting) -> None:
    assert await texts.put([("a", b"1"), ("b", b"2")], 1) == 0
    assert await texts.get("a") == b"1"

    async def gone() -> bool:
        return await texts.get("a") is None

    await until(gone)


class Stuffed:
    """A store that takes nothing."""

    async def put(self, texts: Sequence[tuple[str, bytes]], seconds: int) -> int:
        raise StoreDown("here", "full")

    async def get(self, name: str) -> bytes | None:
        raise StoreDown("here", "full")


async def test_a_store_that_is_away_costs_nobody_anything_and_what_is_lost_is_counted() -> None:
    board = Board(Stuffed())
    async with running([board.shared]):
        board.served(1)

        async def counted() -> bool:
            await board.passes(1)
            return board.dropped == 2  # the request and the way from its room to it

        await until(counted)
        assert await board.shared.room(Room(1)) is None
        assert await board.shared.request("r") is None
        board.served(2, "later")
        await until(lambda: _drops(board, 4))


async def _drops(board: Board, count: int) -> bool:
    await board.passes(1)
    return board.dropped == count


def test_what_waits_is_bounded_and_what_is_too_long_is_left_out() -> None:
    board = Board(Stuffed())
    for number in range(1, MOST_WAITING + 11):
        board.shared._closed(meeting(number, f"r{number}"))
    assert (len(board.shared._waiting), board.dropped) == (MOST_WAITING, 10)
    board = Board(Stuffed())
    one = board.ledger.open(meeting(1))
    board.ledger.close(one, "failed", {"message": "x" * MOST_BYTES})
    board.clock.advance(9)
    assert (board.shared._due(), board.dropped) == ([], 1)


async def test_a_real_store_that_dies_and_comes_back_is_written_again() -> None:
    with durable() as redis:
        texts = Lasting(redis.url, deadline_s=5.0)
        try:
            assert await texts.put([("a", b"1")], 60) == 0
            redis.kill()
            assert await texts.put([("b", b"2")], 60) == 1
            with pytest.raises(StoreDown):
                await texts.get("a")
            redis.start()
            await until(lambda: _written(texts))
        finally:
            await texts.close()


async def _written(texts: Lasting) -> bool:
    return await texts.put([("b", b"2")], 60) == 0 and await texts.get("b") == b"2"

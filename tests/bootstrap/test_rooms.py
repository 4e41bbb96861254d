"""Rooms: numbers engines can use, and a table that forgets."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.clock import FakeClock
from kit.directory import Seat, serving
from kit.memory import bytes_in
from kit.wait import until

from kvplane.bootstrap import RoomSweeper, RoomTable, mint, rooms

TOP = 2**63 - 1


@given(st.integers(0, TOP), st.integers(1, 4096), st.data())
def test_a_room_is_in_range_and_leads_to_its_dp_rank(
    drawn: int, size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    room = mint(lambda: drawn, rank, size)
    assert 1 <= room <= TOP
    assert room % size == rank


@pytest.mark.parametrize("drawn", [0, 1, TOP, TOP - 1])
def test_the_ends_of_the_range_are_rooms_too(drawn: int) -> None:
    for size in (1, 2, 3, 7):
        for rank in range(size):
            assert 1 <= mint(lambda: drawn, rank, size) <= TOP


def test_a_rank_outside_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_rank 4: must be 0 to 3"):
        mint(lambda: 5, 4, 4)


def test_a_room_is_known_until_its_time_is_over_and_asking_does_not_prolong_it() -> None:
    table = RoomTable(ttl_s=10)
    table.register(7, 3, now=0)
    assert table.query([7, 8], now=9.9) == {7: 3}
    assert table.query([7], now=10) == {}
    table.register(7, 1, now=11)  # the same number again is a new meeting
    assert table.query([7], now=20.9) == {7: 1}


def test_a_room_told_again_lives_from_then() -> None:
    table = RoomTable(ttl_s=10)
    table.register(1, 0, now=0)
    table.register(2, 0, now=1)
    table.register(1, 5, now=9)
    assert table.expire(now=11) == 1
    assert table.query([1, 2], now=11) == {1: 5}


def test_the_oldest_room_goes_when_the_table_is_full() -> None:
    table = RoomTable(ttl_s=10, most=3)
    for room in range(5):
        table.register(room, room, now=0)
    assert table.query(range(5), now=1) == {2: 2, 3: 3, 4: 4}
    assert (len(table), table.pushed_out) == (3, 2)


def test_a_meeting_that_is_over_is_forgotten() -> None:
    table = RoomTable()
    table.register(1, 0, now=0)
    assert [table.forget(1), table.forget(1)] == [True, False]
    assert (len(table), table.forgotten, table.expire(now=1e9)) == (0, 1, 0)


async def sweep(table: RoomTable, clock: FakeClock, periods: int) -> None:
    """Nobody asks: only the sweeper's clock moves."""
    sweeper = RoomSweeper(table, clock, every_s=120)
    await sweeper.start()
    try:
        for _ in range(periods):
            await until(lambda: clock._sleepers, what="sweeper sleeps")
            clock.advance(120)
        await until(lambda: clock._sleepers, what="sweeper has swept")
    finally:
        await sweeper.stop()


def fill(table: RoomTable, count: int, now: float) -> None:
    """Rooms all over the range, as they are drawn."""
    for i in range(count):
        table.register((i * 0x9E3779B97F4A7C15) % 2**63, i % 4, now)


async def test_300000_rooms_that_nobody_asks_for_are_gone_after_two_periods(
    clock: FakeClock,
) -> None:
    """FR-BS-11: the entry count returns to zero; a reused room answers with the new rank only."""
    table = RoomTable(ttl_s=240)
    fill(table, 300_000, clock.now())
    assert len(table) == 300_000
    await sweep(table, clock, periods=2)
    assert (len(table), table.expired, table.pushed_out) == (0, 300_000, 0)
    table.register(0, 3, clock.now())
    assert table.query([0], clock.now()) == {0: 3}


async def test_the_memory_of_rooms_is_bounded_and_comes_back(clock: FakeClock) -> None:
    """FR-BS-11: below 250 bytes a room, so 300 000 hold below 75 MB; nothing stays."""
    tracemalloc.start()
    try:
        table = RoomTable(ttl_s=240, most=30_000)
        fill(table, 60_000, clock.now())
        held, most = tracemalloc.get_traced_memory()
        await sweep(table, clock, periods=2)
        left = bytes_in(rooms.__file__)
    finally:
        tracemalloc.stop()
    assert len(table) == 0
    assert held < 30_000 * 250
    assert most < 30_000 * 400, "also while the tables grow"
    assert left < 300_000


def test_a_flood_pushes_the_oldest_out_and_memory_stays_bounded() -> None:
    """FR-BS-11: more rooms than the table takes, all within their time."""
    table = RoomTable(ttl_s=240, most=1000)
    for room in range(50_000):
        table.register(room, 0, now=room / 1000)
    assert (len(table), table.pushed_out) == (1000, 49_000)
    assert table.query([48_999, 49_000, 49_999], now=50) == {49_000: 0, 49_999: 0}


steps = st.lists(
    st.tuples(
        st.sampled_from(["tell", "forget", "sweep"]), st.integers(0, 6), st.integers(0, 3),
        st.integers(0, 7),
    ),
    max_size=60,
)  # fmt: skip


@given(steps)
def test_the_table_is_a_list_of_what_was_told(steps: list[tuple[str, int, int, int]]) -> None:
    """Against a naive model: every telling kept, the last one counts while its time is not over."""
    table, now, told = RoomTable(ttl_s=10, most=100), 0.0, list[tuple[int, int, float]]()
    for step, room, rank, wait in steps:
        now += wait
        if step == "tell":
            table.register(room, rank, now)
            told.append((room, rank, now))
        elif step == "forget":
            table.forget(room)
            told = [one for one in told if one[0] != room]
        else:
            table.expire(now)
        expected = {r: k for r, k, at in told if now < at + 10 and (r, at) == latest(told, r)}
        assert table.query(range(7), now) == dict(sorted(expected.items()))
        assert len(table._deadlines) == len(table) <= 7
    table.expire(now)
    assert len(table) == len(table.query(range(7), now))


def latest(told: list[tuple[int, int, float]], room: int) -> tuple[int, float]:
    return room, [at for r, _, at in told if r == room][-1]


async def post(seat: Seat, path: str, body: object) -> tuple[int, str]:
    reply = await seat.wire.call("POST", path, json.dumps(body).encode())
    return reply.status, reply.text


async def test_rooms_are_forgotten_when_their_meeting_is_over() -> None:
    async with serving(metrics=True) as seat:
        for room in (1, 2, 3):
            await post(seat, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": 7})
        asked = {"bootstrap_rooms": [1, "3", 9, 1]}
        assert await post(seat, "/forget_rooms", asked) == (200, '{"forgotten": 2}')
        assert await post(seat, "/forget_rooms", asked) == (200, '{"forgotten": 0}')
        assert await post(seat, "/query_dp_ranks", {"bootstrap_rooms": [1, 2, 3]}) == (
            200,
            '{"2": 7}',
        )
        text = (await seat.wire.call("GET", "/metrics")).text
        assert "kvplane_bootstrap_rooms_forgotten 2.0" in text


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/register_dp_rank", {"bootstrap_room": 2**64, "dp_rank": 0}, "bootstrap_room"),
    ("/register_dp_rank", {"bootstrap_room": "9" * 3000, "dp_rank": 0}, "bootstrap_room"),
    ("/register_dp_rank", {"bootstrap_room": 1e300, "dp_rank": 0}, "bootstrap_room"),
    ("/register_dp_rank", {"bootstrap_room": 1, "dp_rank": 2**31}, "dp_rank"),
    ("/register_dp_rank", {"bootstrap_room": 1, "dp_rank": True}, "dp_rank"),
    ("/register_dp_rank", {"bootstrap_room": [1], "dp_rank": 0}, "bootstrap_room"),
    ("/query_dp_ranks", {"bootstrap_rooms": [2**64]}, "bootstrap_rooms"),
    ("/query_dp_ranks", {"bootstrap_rooms": [None]}, "bootstrap_rooms"),
    ("/query_dp_ranks", {"bootstrap_rooms": [1] * 70_000}, "bootstrap_rooms"),
    ("/query_dp_ranks", {"bootstrap_rooms": 7}, "bootstrap_rooms"),
    ("/query_dp_ranks", [1], "body"),
    ("/forget_rooms", {"bootstrap_rooms": ["x"]}, "bootstrap_rooms"),
    ("/forget_rooms", {}, "bootstrap_rooms"),
])  # fmt: skip
async def test_what_can_be_no_room_is_named(
    seat: Seat, path: str, body: object, field: str
) -> None:
    status, text = await post(seat, path, body)
    assert (status, text.startswith(f"{field} "), len(seat.rooms)) == (400, True, 0)
    assert len(text) < 300


@pytest.mark.parametrize("room", [-(2**63), 2**63 - 1, 2**64 - 1, 0])
async def test_every_number_of_64_bits_is_a_room(seat: Seat, room: int) -> None:
    assert (await post(seat, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": -1}))[
        0
    ] == 200
    asked = {"bootstrap_rooms": [str(room)]}
    assert await post(seat, "/query_dp_ranks", asked) == (200, f'{{"{room}": -1}}')

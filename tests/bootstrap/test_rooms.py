"""Rooms: numbers engines can use, and a table that forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.clock import FakeClock
from kit.wait import until

from kvplane.bootstrap import RoomSweeper, RoomTable, mint

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
    table.forget(1)
    table.forget(1)
    assert len(table) == 0


def test_300000_rooms_come_in_and_the_table_stays_bounded() -> None:  # FR-BS-11
    table = RoomTable(ttl_s=240, most=1000)
    for room in range(300_000):
        table.register(room, 0, now=room / 1000)
    assert len(table) == 1000


async def test_rooms_go_when_nobody_asks_any_more(clock: FakeClock) -> None:  # FR-BS-11
    table = RoomTable(ttl_s=240)
    for room in range(5000):
        table.register(room, 0, now=clock.now())
    sweeper = RoomSweeper(table, clock, every_s=30)
    await sweeper.start()
    try:
        for _ in range(9):
            await until(lambda: clock._sleepers, what="sweeper sleeps")
            clock.advance(30)
        await until(lambda: len(table) == 0, what="table is empty")
    finally:
        await sweeper.stop()
    table.register(7, 2, clock.now())
    assert table.query([7], clock.now()) == {7: 2}

"""Polls: one question instead of a storm, and nothing left behind by who leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.clock import FakeClock
from kit.directory import Reply, Seat, Wire, serving
from kit.wait import until

from kvplane.bootstrap.answers import preferred_wait
from kvplane.bootstrap.polls import MOST_AWAITED, Outcome, Polls


async def never() -> None:
    await asyncio.Event().wait()


def waiting(polls: Polls, *rooms: int, wait_s: float = 10.0) -> asyncio.Task[Outcome]:
    return asyncio.create_task(polls.wait(rooms, wait_s, never))


def is_empty(polls: Polls) -> bool:
    return len(polls) == 0 and not polls._waiting and polls._awaited == 0


async def test_a_question_ends_with_the_last_of_its_rooms(clock: FakeClock) -> None:
    polls = Polls(clock, 10)
    both, one = waiting(polls, 1, 2), waiting(polls, 2)
    await until(lambda: len(polls) == 2, what="both wait")
    polls.told(2)
    polls.told(9)
    assert await one is Outcome.TOLD
    assert not both.done()
    polls.told(1)
    polls.told(1)
    assert await both is Outcome.TOLD
    assert is_empty(polls)


async def test_a_question_ends_when_its_time_is_over(clock: FakeClock) -> None:
    polls = Polls(clock, 10)
    task = waiting(polls, 1, 2, wait_s=10)
    await until(lambda: clock._sleepers, what="it waits")
    polls.told(1)
    clock.advance(10)
    assert await task is Outcome.OVER
    assert is_empty(polls)


async def test_a_client_that_leaves_is_given_back_at_once(clock: FakeClock) -> None:
    polls, gone = Polls(clock, 10), asyncio.Event()

    async def left() -> None:
        await gone.wait()

    task = asyncio.create_task(polls.wait([1], 10, left))
    await until(lambda: len(polls) == 1, what="it waits")
    gone.set()
    assert await task is Outcome.LEFT
    assert is_empty(polls)


async def test_a_question_that_is_cancelled_leaves_nothing(clock: FakeClock) -> None:
    polls = Polls(clock, 10)
    task = waiting(polls, 1, 2)
    await until(lambda: len(polls) == 1, what="it waits")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert is_empty(polls)
    assert len(asyncio.all_tasks()) == 1


async def test_too_many_questions_and_too_many_rooms_are_answered_at_once(
    clock: FakeClock,
) -> None:
    polls = Polls(clock, 2)
    first, big = waiting(polls, 1), waiting(polls, *range(2, 1000))
    await until(lambda: len(polls) == 2, what="both wait")
    assert await polls.wait([5], 10, never) is Outcome.BUSY
    polls.told(1)
    await first
    assert await polls.wait(range(MOST_AWAITED), 10, never) is Outcome.BUSY
    await polls.stop()
    assert await big is Outcome.CLOSED
    assert await polls.wait([5], 10, never) is Outcome.CLOSED
    assert is_empty(polls)


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "tell", "time", "leave"]), st.sets(st.integers(0, 5))),
    max_size=20,
)


@given(steps)
def test_whatever_happens_nobody_waits_longer_than_he_must(steps: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        clock = FakeClock()
        polls = Polls(clock, 100)
        asked: list[tuple[set[int], asyncio.Task[Outcome], asyncio.Event]] = []
        for step, rooms in steps:
            if step == "ask" and rooms:
                gone = asyncio.Event()

                async def left(gone: asyncio.Event = gone) -> None:
                    await gone.wait()

                task = asyncio.create_task(polls.wait(rooms, 10, left))
                asked.append((set(rooms), task, gone))
            elif step == "tell":
                for room in rooms:
                    polls.told(room)
                    for missing, _, _ in asked:
                        missing.discard(room)
            elif step == "time":
                clock.advance(10)
            elif step == "leave" and asked:
                asked[0][2].set()
            for _ in range(10):
                await asyncio.sleep(0)
            for missing, task, gone in list(asked):
                assert task.done() == (not missing or gone.is_set() or step == "time")
                if task.done():
                    asked.remove((missing, task, gone))
            assert len(polls) == len(asked)
        await polls.stop()
        await asyncio.gather(*(task for _, task, _ in asked))
        assert is_empty(polls)

    asyncio.run(run())


@pytest.mark.parametrize(("headers", "expected"), [
    ([], 0), ([""], 0), (["wait=10"], 10), (["respond-async, wait=5"], 5), (["WAIT = 7"], 7),
    (['wait="3"'], 3), (["wait=3; x=1, return=minimal"], 3), (["a", "wait=4"], 4),
    (["wait=4, wait=9"], 4), (["wait=999999"], 30), (["wait=" + "9" * 5000], 30), (["wait=0"], 0),
    (["wait"], 0), (["wait="], 0), (["wait=-1"], 0), (["wait=1.5"], 0), (["wait=x"], 0),
    (["wait=٣"], 0), (["wait=nan"], 0), (["waiting=5"], 0), (["x=wait=5"], 0),
])  # fmt: skip
def test_how_long_a_caller_would_wait(headers: list[str], expected: float) -> None:
    assert preferred_wait(headers, 30) == expected


def query(wire: Wire, *rooms: int, wait: str = "wait=10") -> asyncio.Task[Reply]:
    raw = json.dumps({"bootstrap_rooms": rooms}).encode()
    return asyncio.create_task(wire.call("POST", "/query_dp_ranks", raw, {"Prefer": wait}))


async def tell(seat: Seat, room: int, dp_rank: int) -> None:
    raw = json.dumps({"bootstrap_room": room, "dp_rank": dp_rank}).encode()
    assert (await seat.wire.call("POST", "/register_dp_rank", raw)).status == 200


async def test_a_question_waits_until_all_its_rooms_are_known() -> None:
    """FR-BS-07, the server's part: the rank is asked for, not guessed, and without a storm."""
    async with serving(metrics=True) as seat:
        asker = Wire(seat.port)
        await tell(seat, 10, 3)
        asked = query(asker, 10, 11, 12)
        await until(lambda: len(seat.app.polls) == 1, what="it waits")
        await tell(seat, 12, 0)
        assert not asked.done()
        await tell(seat, 11, 1)
        reply = await asked
        assert reply.json() == {"10": 3, "11": 1, "12": 0}
        assert reply.headers["preference-applied"] == "wait"
        reply = await query(asker, 10)
        assert (reply.json(), reply.headers["preference-applied"]) == ({"10": 3}, "wait")
        text = (await seat.wire.call("GET", "/metrics")).text
        assert 'kvplane_bootstrap_polls_total{outcome="told"} 1.0' in text
        assert "kvplane_bootstrap_polls_waiting 0.0" in text
        await asker.close()


async def test_what_is_known_is_told_when_the_time_is_over(seat: Seat) -> None:
    asker = Wire(seat.port)
    await tell(seat, 10, 3)
    asked = query(asker, 10, 11, wait="wait=90")
    await until(lambda: seat.clock._sleepers, what="it waits")
    seat.clock.advance(29.9)
    assert len(seat.app.polls) == 1
    seat.clock.advance(0.1)
    reply = await asked
    assert (reply.status, reply.json()) == (200, {"10": 3})
    assert reply.headers["preference-applied"] == "wait"
    await asker.close()


async def test_without_the_header_the_answer_comes_at_once(seat: Seat) -> None:
    reply = await query(seat.wire, 11, wait="respond-async")
    assert (reply.json(), "preference-applied" in reply.headers) == ({}, False)


async def test_a_client_that_hangs_up_makes_room_for_the_next() -> None:
    async with serving(metrics=True, most_polls=1) as seat:
        first, second = Wire(seat.port), Wire(seat.port)
        asked = query(first, 1)
        await until(lambda: len(seat.app.polls) == 1, what="the first waits")
        reply = await query(second, 2)
        assert (reply.json(), "preference-applied" in reply.headers) == ({}, False)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await first.close()
        await until(lambda: len(seat.app.polls) == 0, what="the first is gone")
        again = query(second, 2)
        await until(lambda: len(seat.app.polls) == 1, what="the second waits")
        await tell(seat, 2, 5)
        assert (await again).json() == {"2": 5}
        text = (await seat.wire.call("GET", "/metrics")).text
        for outcome in ("busy", "left", "told"):
            assert f'kvplane_bootstrap_polls_total{{outcome="{outcome}"}} 1.0' in text
        await second.close()


async def test_who_waits_is_answered_when_the_directory_stops(seat: Seat) -> None:
    asker = Wire(seat.port)
    asked = query(asker, 1)
    await until(lambda: len(seat.app.polls) == 1, what="it waits")
    await seat.app.stop()
    assert (await asked).json() == {}
    assert (await query(asker, 1)).json() == {}
    await asker.close()

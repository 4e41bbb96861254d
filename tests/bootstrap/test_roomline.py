"""Room line: rooms are found soon after they are told, and no directory is stormed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from kit.clock import FakeClock
from kit.directory import serving
from kit.peer import Call, answer, peer
from kit.wait import until

from kvplane.bootstrap import (
    BootstrapClient,
    NewLife,
    NoDirectory,
    Resolver,
    ResolverSettings,
    RoomRanks,
    fresh_session,
)
from kvplane.bootstrap.roomline import RoomLine
from kvplane.vocabulary import Room

SETTINGS = ResolverSettings()


@dataclass
class Fake:
    """A directory that knows what the test tells it, and keeps questions if it `waits`."""

    clock: FakeClock
    waits: bool = False
    says: bool = True  # that it kept the question
    known: dict[Room, int] = field(default_factory=dict)
    error: Exception | None = None
    asked: list[tuple[float, int, float]] = field(default_factory=list)  # when, rooms, wait
    kept: int = 0

    async def __call__(self, rooms: Sequence[Room], wait_s: float) -> RoomRanks:
        self.asked.append((self.clock.now(), len(rooms), wait_s))
        if self.error is not None:
            raise self.error
        end = self.clock.now() + int(wait_s)
        self.kept += bool(wait_s) and self.waits
        while self.waits and self.clock.now() < end and not self.known.keys() >= set(rooms):
            await self.clock.sleep(0.01)
        self.kept -= bool(wait_s) and self.waits
        found = {room: self.known[room] for room in rooms if room in self.known}
        return RoomRanks(found, None, self.says and self.waits and wait_s > 0)

    def most_in_a_second(self) -> int:
        times = [at for at, _, _ in self.asked]
        return max(sum(at <= t < at + 1 for t in times) for at in times)


@pytest.fixture
def fake(clock: FakeClock) -> Fake:
    return Fake(clock)


@pytest.fixture
async def line(fake: Fake, clock: FakeClock) -> AsyncIterator[RoomLine]:
    made = RoomLine(fake, clock, SETTINGS)
    yield made
    await made.close()


async def passes(clock: FakeClock, seconds: float, *tasks: asyncio.Task[object]) -> None:
    """Time goes on in steps of 5 ms until it is over or all tasks are done."""
    end = clock.now() + seconds
    while clock.now() < end and not (tasks and all(task.done() for task in tasks)):
        for _ in range(12):  # let everybody who was woken go on until they wait again
            await asyncio.sleep(0)
        clock.advance(0.005)


def ask(line: RoomLine, *rooms: int, wait_s: float = 0.0) -> asyncio.Task[dict[Room, int]]:
    return asyncio.create_task(line.ranks([Room(room) for room in rooms], wait_s))


async def test_without_a_wait_it_says_what_is_known_now(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    """FR-BS-07: a room nobody told is absent, not an error."""
    fake.known = {Room(10): 3}
    assert await line.ranks([Room(10), Room(11)]) == {10: 3}
    assert len(fake.asked) == 1


async def test_rooms_asked_for_within_a_moment_are_one_question(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    fake.known = {Room(room): room % 4 for room in range(1000)}
    tasks = [ask(line, room) for room in range(1000)]
    await passes(clock, 1.0, *tasks)
    assert [task.result() for task in tasks] == [{room: room % 4} for room in range(1000)]
    assert len(fake.asked) <= 2


async def test_a_storm_of_rooms_that_nobody_tells_is_a_trickle_of_questions(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    """A directory that answers at once, as SGLang's: 300 rooms wait 10 s behind a prefill queue."""
    tasks = []
    for room in range(300):
        tasks.append(ask(line, room, wait_s=10.0))
        await passes(clock, 0.01)
    await passes(clock, 20.0, *tasks)
    assert [task.result() for task in tasks] == [{}] * 300
    gap = SETTINGS.rooms_gap_s
    assert fake.most_in_a_second() <= 1 / gap + 1
    assert len(fake.asked) < 13 / gap  # 300 rooms times 15 without any care


async def test_a_room_is_found_within_a_second_of_being_told(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    task = ask(line, 7, wait_s=60.0)
    await passes(clock, 30.0, task)
    assert not task.done()
    fake.known[Room(7)] = 2
    told_at = clock.now()
    await passes(clock, 10.0, task)
    assert task.result() == {7: 2}
    assert clock.now() - told_at <= SETTINGS.rooms_most_s * 1.3


async def test_a_directory_that_keeps_questions_is_asked_once_per_room(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    fake.waits = True
    first = ask(line, 1, wait_s=20.0)
    await passes(clock, 3.0)  # it was found out that this one keeps questions
    before = len(fake.asked)
    task = ask(line, 7, wait_s=20.0)
    await passes(clock, 5.0)
    assert not task.done()
    fake.known[Room(7)] = 2
    told_at = clock.now()
    await passes(clock, 5.0, task)
    assert task.result() == {7: 2}
    assert clock.now() - told_at <= 0.05
    assert len(fake.asked) - before == 2  # one to see, one that waits
    first.cancel()


async def test_no_more_than_a_few_questions_wait_in_one_directory(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    fake.waits = True
    tasks = [ask(line, room, wait_s=25.0) for room in range(100)]
    await passes(clock, 5.0)
    assert fake.kept == SETTINGS.most_polls
    fake.known = {Room(room): 0 for room in range(100)}
    await passes(clock, 2.0, *tasks)
    assert all(task.result() for task in tasks)
    assert fake.most_in_a_second() <= 1 / SETTINGS.rooms_gap_s + 1


async def test_a_directory_that_says_it_waited_and_did_not_is_not_believed(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    """One that is stopping answers all who wait at once."""

    async def hasty(rooms: Sequence[Room], wait_s: float) -> RoomRanks:
        fake.asked.append((clock.now(), len(rooms), wait_s))
        return RoomRanks({}, None, wait_s > 0)

    line._ask = hasty
    task = ask(line, 7, wait_s=10.0)
    await passes(clock, 20.0, task)
    assert task.result() == {}
    assert len(fake.asked) < 25


async def test_a_failure_reaches_all_who_wait(fake: Fake, line: RoomLine, clock: FakeClock) -> None:
    fake.error = NoDirectory("h:1", "connection refused")
    tasks = [ask(line, room, wait_s=10.0) for room in range(5)]
    await passes(clock, 1.0, *tasks)
    for task in tasks:
        with pytest.raises(NoDirectory):
            task.result()


async def test_when_the_life_is_over_who_waits_is_told_at_once(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    """FR-BS-10, FR-TR-07: also those whose question is kept by a server that is over."""
    fake.waits = True
    tasks = [ask(line, room, wait_s=20.0) for room in range(30)]
    await passes(clock, 3.0)
    line.end(NewLife("h:1", None, None))
    await until(lambda: all(task.done() for task in tasks))
    for task in [*tasks, ask(line, 7)]:
        with pytest.raises(NewLife, match="was replaced"):
            await task


async def test_one_who_leaves_takes_nobody_with_him(
    fake: Fake, line: RoomLine, clock: FakeClock
) -> None:
    first, second = ask(line, 1, 2, wait_s=5.0), ask(line, 2, wait_s=5.0)
    await passes(clock, 0.2)
    first.cancel()
    fake.known[Room(2)] = 1
    await passes(clock, 5.0, second)
    assert second.result() == {2: 1}
    assert first.cancelled()


async def test_our_own_server_keeps_the_question_until_the_room_is_told() -> None:
    """All real: resolver, client, server."""
    async with serving(metrics=True) as seat, fresh_session() as session:
        client = BootstrapClient(session)
        resolver = Resolver(client)
        await seat.put()
        looking = asyncio.create_task(resolver.dp_ranks(seat.address, [Room(5)], wait_s=30))
        waiting = "kvplane_bootstrap_polls_waiting"
        await until(lambda: seat.registry.get_sample_value(waiting))
        await client.register_dp_rank(seat.address, 5, 3)
        assert await asyncio.wait_for(looking, 10) == {5: 3}
        await until(lambda: not seat.registry.get_sample_value(waiting))
        await resolver.close()


async def test_a_server_that_answers_at_once_gets_a_trickle_over_the_wire() -> None:
    """As SGLang's: 100 rooms wait two seconds; the questions are counted where they arrive."""

    async def script(call: Call) -> None:
        while await call.request():
            await call.send(answer(b"{}"))

    async with fresh_session() as session, peer(script) as other:
        resolver = Resolver(BootstrapClient(session))
        address = other.url.removeprefix("http://")
        wait = [resolver.dp_ranks(address, [Room(room)], wait_s=2.0) for room in range(100)]
        assert await asyncio.gather(*wait) == [{}] * 100
        assert len(other.requests) < 2 * 30
        await resolver.close()

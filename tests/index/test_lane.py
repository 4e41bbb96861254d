"""Commands that go together: each gets its own answer, and nobody another's trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import ResponseError

from kvplane.index import Applied, Batch, Note, RedisStore, StoreDown
from kvplane.index.stores.lane import MOST, MOST_WORDS, Lane
from kvplane.runtime import cancel
from kvplane.vocabulary import Epoch, Pod, Worker


class Node:
    """Answers each command with itself when it is let; a fault is raised for all that go."""

    def __init__(self) -> None:
        self.went: list[list[Any]] = []
        self.open = asyncio.Event()
        self.fault: Exception | None = None

    async def calls(self, commands: Sequence[Any]) -> list[Any]:
        self.went.append([command[0] for command in commands])
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return [ResponseError("no") if c[0] == "bad" else c[0] for c in commands]


async def asked(lane: Lane, *commands: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(lane.call(command)) for command in commands]
    await asyncio.sleep(0)
    return tasks


async def under_way(lane: Lane, node: Node) -> list[asyncio.Task[Any]]:
    """One that went alone and waits for its answer."""
    tasks = await asked(lane, ("first",))
    await asyncio.sleep(0)
    assert node.went == [["first"]]
    return tasks


async def test_the_first_goes_at_once_and_the_others_go_together() -> None:
    node = Node()
    lane = Lane(node.calls)
    tasks = await under_way(lane, node)
    tasks += await asked(lane, (1,), (2,), ("bad",), (3,))
    node.open.set()
    answers = await asyncio.gather(*tasks)
    assert node.went == [["first"], [1, 2, "bad", 3]]
    assert answers[:3] == ["first", 1, 2] and answers[4] == 3
    assert isinstance(answers[3], ResponseError)  # its own, nobody else's


async def test_who_gives_up_is_left_out_and_takes_nobody_along() -> None:
    node = Node()
    lane = Lane(node.calls)
    first = await under_way(lane, node)
    tasks = await asked(lane, (1,), (2,), (3,))
    await cancel(tasks[1], first[0])
    node.open.set()
    assert await asyncio.gather(tasks[0], tasks[2]) == [1, 3]
    assert node.went == [["first"], [1, 3]]


async def test_a_store_that_is_down_is_down_for_all_who_went_and_for_nobody_after() -> None:
    node = Node()
    lane = Lane(node.calls)
    node.open.set()
    node.fault = StoreDown("here", "gone")
    tasks = await asked(lane, (1,), (2,))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, StoreDown) for one in found)
    node.fault = None
    assert await lane.call((3,)) == 3


async def test_a_fault_of_ours_leaves_nobody_waiting() -> None:
    node = Node()
    lane = Lane(node.calls)
    first = await under_way(lane, node)
    tasks = first + await asked(lane, (1,))
    node.fault = KeyError("ours")
    node.open.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError | KeyError) for one in found)


async def test_so_many_go_at_once_and_no_more() -> None:
    node = Node()
    lane = Lane(node.calls)
    first = await under_way(lane, node)
    tasks = first + await asked(lane, *((number,) for number in range(2 * MOST + 1)))
    node.open.set()
    assert await asyncio.gather(*tasks) == ["first", *range(2 * MOST + 1)]
    assert [len(some) for some in node.went] == [1, MOST, MOST, 1]


async def test_long_commands_go_alone() -> None:
    node = Node()
    lane = Lane(node.calls)
    tasks = await under_way(lane, node)
    long = ["x"] * MOST_WORDS
    tasks += await asked(lane, (1,), (2, *long), (3, *long), (4,))
    node.open.set()
    await asyncio.gather(*tasks)
    assert node.went == [["first"], [1], [2], [3], [4]]


async def test_the_end_leaves_nobody_waiting() -> None:
    node = Node()
    lane = Lane(node.calls)
    tasks = await under_way(lane, node) + await asked(lane, (1,))
    await lane.aclose()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in found)


def rows(worker: Worker, sequence: int) -> Batch:
    return Batch(worker, Epoch(1), sequence, sequence, (), {b"!x": Note(b"1")}, False)


@pytest.fixture
async def store(redis_url: str) -> Any:
    made = RedisStore(redis_url)
    yield made
    await made.close()


async def test_many_workers_write_at_once_and_each_hears_of_its_own(store: RedisStore) -> None:
    workers = [Worker(Pod(f"many{number}")) for number in range(50)]
    for worker in workers:
        await store.begin_life(worker, None)
    for sequence in range(3):
        found = await asyncio.gather(*(store.apply(rows(worker, sequence)) for worker in workers))
        assert {type(one) for one in found} == {Applied}, found
    for worker in workers:
        position = await store.position(worker)
        assert position is not None and position.last == 2


async def test_one_workers_broken_key_is_nobody_elses_trouble(
    store: RedisStore, redis_url: str
) -> None:
    good, bad = Worker(Pod("good")), Worker(Pod("bad"))
    for worker in (bad, good):
        await store.begin_life(worker, None)
    table = store._layout.table(bad, Epoch(1))
    await store._line.call(table, "SET", table, "a text")  # somebody else wrote there
    for sequence, order in enumerate(((bad, good), (good, bad), (good, bad, good))):
        asks = [store.apply(rows(worker, sequence)) for worker in dict.fromkeys(order)]
        found = dict(zip(dict.fromkeys(order), await asyncio.gather(*asks, return_exceptions=True),
                         strict=True))  # fmt: skip
        position = await store.position(good)
        assert position is not None and position.last == sequence, found


async def test_a_server_that_forgot_the_script_is_told_it_again(store: RedisStore) -> None:
    workers = [Worker(Pod(f"forgot{number}")) for number in range(20)]
    for worker in workers:
        await store.begin_life(worker, None)
    await store._line.call("x", "SCRIPT", "FLUSH")
    found = await asyncio.gather(*(store.apply(rows(worker, 0)) for worker in workers))
    assert {type(one) for one in found} == {Applied}, found

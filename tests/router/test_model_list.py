"""Model list: union by id, every member kept, and where engines differ a rule; FR-AP-15."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kit.gatehouse import gatehouse, worker
from kit.peer import Call, Script, answer, replies
from kit.wait import until

from kvplane.router.engines import Models
from kvplane.router.model_list import entries_of, merged
from kvplane.vocabulary import Role

ADAPTER = {"id": "tiny-lora", "object": "model", "parent": "tiny", "root": "/loras/tiny"}


def listing(*entries: dict[str, Any]) -> Script:
    return replies(answer(json.dumps({"object": "list", "data": entries}).encode()))


def test_every_member_any_engine_gives_is_kept() -> None:
    one = {"id": "tiny", "max_model_len": 512, "owned_by": "vllm"}
    two = {"id": "tiny", "owned_by": "vllm", "capabilities": {"vision": False}, "root": None}
    found = merged([[one, ADAPTER], [two]], ())
    assert found == [one | {"capabilities": {"vision": False}, "root": None}, ADAPTER]


def test_where_engines_differ_the_rule_decides_and_the_difference_is_shown() -> None:
    one = {"id": "tiny", "max_model_len": 512, "created": 9, "permission": [1], "owned_by": "a"}
    two = {"id": "tiny", "max_model_len": 256, "created": 5, "permission": [2], "owned_by": "b"}
    conflicts = {"max_model_len": [512, 256], "owned_by": ["a", "b"]}
    assert merged([[one], [two]], ()) == [
        {
            "id": "tiny",
            "max_model_len": 256,
            "created": 5,
            "permission": [1],
            "owned_by": "a",
            "kvplane": {"conflicts": conflicts},
        }
    ]


def test_who_says_nothing_of_a_member_contradicts_nobody() -> None:
    one, two = {"id": "tiny", "max_model_len": None}, {"id": "tiny", "max_model_len": 256}
    assert merged([[one], [two]], ()) == [two]
    odd = {"id": "tiny", "max_model_len": "many"}
    (found,) = merged([[odd], [two]], ())
    assert found["max_model_len"] == "many"
    assert found["kvplane"]["conflicts"] == {"max_model_len": ["many", 256]}


def test_what_is_no_list_of_models_is_left_out() -> None:
    for told in (None, 5, [], {"data": 5}, {"data": [5, None, {"id": 5}, {"name": "x"}]}):
        assert entries_of(told) == []


def test_models_that_no_engine_lists_are_there_by_name() -> None:
    up = worker("p", "http://p:1", Role.PREFILL, adapters=("lora",), max_tokens=99)
    found = merged([[{"id": "tiny", "x": 1}]], [up])
    assert [one["id"] for one in found] == ["lora", "tiny"]
    assert (found[0]["root"], found[0]["max_model_len"]) == ("tiny", 99)
    assert found[1] == {"id": "tiny", "x": 1}


async def test_all_engines_are_asked_at_once_and_a_silent_one_is_left_out() -> None:
    met = asyncio.Event()
    tiny = {"id": "tiny", "max_model_len": 512, "object": "model"}

    async def first(call: Call) -> None:
        await call.request()
        await met.wait()
        await call.send(answer(json.dumps({"data": [tiny, ADAPTER]}).encode()))

    async def second(call: Call) -> None:
        await call.request()
        met.set()
        await call.send(answer(json.dumps({"data": [{"id": "tiny", "extra": 1}]}).encode()))

    async def broken(call: Call) -> None:
        await call.request()
        call.reset()

    facts = {name: {"adapters": ("tiny-lora",)} for name in ("p1", "p2", "d1")}
    async with gatehouse({"p1": first, "p2": second, "d1": broken}, facts=facts) as house:
        status, found = await house.get("/v1/models")
        assert status == 200 and found["object"] == "list"
        assert found["data"] == [tiny | {"extra": 1}, ADAPTER]
        met.set()
        assert (await house.get("/v1/models/tiny-lora"))[1] == ADAPTER


async def test_many_readers_cost_each_engine_one_question() -> None:
    opened = asyncio.Event()

    async def slow(call: Call) -> None:
        while await call.request():
            await opened.wait()
            await call.send(answer(b'{"data":[{"id":"tiny"}]}'))

    async with gatehouse({"p1": slow, "d1": slow}) as house:
        models = Models(house.gateway)
        readers = [asyncio.create_task(models.ask()) for _ in range(20)]
        await until(lambda: all(engine.requests for engine in house.engines.values()))
        readers.pop().cancel()  # who leaves ends it for nobody else
        opened.set()
        assert await asyncio.gather(*readers) == [[{"id": "tiny"}]] * 19
        assert [len(engine.requests) for engine in house.engines.values()] == [1, 1]
        await models.ask()  # and the next is asked anew
        assert [len(engine.requests) for engine in house.engines.values()] == [2, 2]

"""Prefill and decode over real sockets say exactly what one engine says, or fail by name."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from kit.pair import ROOMS, Pair, Start, ask, asked, pair, prompt
from kit.wait import until

from kvplane.vocabulary import Role


async def test_the_pair_says_what_one_engine_says(start: Start) -> None:
    two, one = await pair(start), await start()
    for seed, tokens in enumerate((1, 10, 15, 16, 17, 32, 100, 333, 1000)):
        prefill, decode = await two.post("/generate", **ask(tokens, seed))
        _, alone = await one.post("/generate", **ask(tokens, seed))
        assert (prefill[0], decode[0]) == (200, 200), (prefill, decode)
        assert decode[1]["output_ids"] == alone["output_ids"]
        assert prefill[1]["output_ids"] == alone["output_ids"][:1]
    await two.idle()


@pytest.mark.parametrize("grid", [{}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("held", [0, 32])
async def test_kv_of_other_tokens_is_no_answer_and_spoils_no_later_one(
    start: Start, grid: dict[str, int], held: int
) -> None:
    """The legs are as long as each other: every count and every page sum agrees."""
    two, one = await pair(start, **grid), await start()
    wanted, other = prompt(64, 1), prompt(64, 2)
    other[:held] = wanted[:held]
    await two.tokens(**asked(wanted[: held + 1]))  # so much of it is held before
    room = two.triple(next(ROOMS))
    prefill, decode = await asyncio.gather(
        two.prefill.post("/generate", **asked(other), **room),
        two.decode.post("/generate", **asked(wanted), **room),
    )
    for status, answer in (prefill, decode):
        assert (status, answer["error"]["stage"]) == (502, "verify")
        assert "another prompt of as many tokens" in answer["error"]["message"]
    longer = asked([*wanted, 5])
    assert await two.tokens(**longer) == await one.tokens(**longer)
    await two.idle()


async def test_a_second_turn_reuses_both_caches_and_says_the_same(start: Start) -> None:
    two, one = await pair(start), await start()
    _, (_, first) = await two.post("/generate", **ask(100))
    longer = ask(100)["input_ids"] + first["output_ids"] + prompt(30, 9)
    body = {"input_ids": longer, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
    (_, prefill), (_, decode) = await two.post("/generate", **body)
    assert decode["output_ids"] == await one.tokens(**body)
    # the prefill holds the prompt's six blocks; the decode the answer's too, and fetches the rest
    assert prefill["meta_info"]["cached_tokens"] == decode["meta_info"]["cached_tokens"] == 96
    assert two.decode.engine.units[0].cache.hits_tokens == 112
    await two.idle()


async def test_batches_and_streams_over_rooms_say_what_one_engine_says(start: Start) -> None:
    two, one = await pair(start), await start()
    body = {"prompt": ["first one", "the second"], "n": 2, "max_tokens": 20, "ignore_eos": True}
    rooms = [next(ROOMS) for _ in range(4)]
    _, (_, decode) = await two.post("/v1/completions", **body, **two.triple(rooms))
    _, alone = await one.post("/v1/completions", **body)
    said = [choice["text"] for choice in decode["choices"]]
    assert said == [choice["text"] for choice in alone["choices"]]
    streamed = {"stream": True} | two.triple([next(ROOMS) for _ in range(4)])
    _, (status, text) = await two.post("/v1/completions", **body | streamed)
    assert status == 200
    assert text.count("data: ") == 81
    assert text.endswith("data: [DONE]\n\n")
    await two.idle()


async def test_every_stage_of_a_room_is_told_by_who_did_it(start: Start) -> None:
    two = await pair(start)
    room = next(ROOMS)
    await two.post("/generate", **ask(40), **two.triple(room))
    seen = {}
    for side in (two.prefill, two.decode):
        status, found = await side.get(f"/rooms/{room}")
        assert (status, found["room"]) == (200, room)
        assert all(stage["outcome"] == "ok" for stage in found["stages"])
        assert all(stage["by"].startswith(side.engine.settings.role) for stage in found["stages"])
        seen[side.engine.settings.role] = [stage["stage"] for stage in found["stages"]]
    assert seen == {
        Role.PREFILL: ["register", "connect", "verify"],
        Role.DECODE: ["resolve-topology", "resolve-rank", "connect", "verify", "consume"],
    }
    assert (await two.decode.get("/rooms/1"))[0] == 404


WRONG = ["flip-byte", "swap-pages", "foreign-room", "short", "stale-generation"]


@pytest.mark.parametrize("kind", WRONG)
async def test_wrong_data_is_never_an_answer_but_a_named_failure_of_verify(
    start: Start, kind: str
) -> None:
    two = await pair(start)
    await two.prefill.post("/fault", stage="verify", kind=kind, count=3)
    for seed in range(3):
        room = next(ROOMS)
        legs = await two.post("/generate", **ask(100, seed), **two.triple(room))
        for status, answer in legs:
            assert status == 502, answer
            assert (answer["error"]["stage"], answer["error"]["room"]) == ("verify", room)
        _, evidence = await two.decode.get(f"/rooms/{room}")
        assert [s["outcome"] for s in evidence["stages"] if s["stage"] == "verify"] == ["failed"]
        assert "consume" not in [stage["stage"] for stage in evidence["stages"]]
    assert two.decode.engine.units[0].cache.blocks() == []
    await two.idle()
    assert (await two.post("/generate", **ask(100)))[1][0] == 200


@pytest.mark.parametrize("kind", ["flip-byte", "swap-pages"])
async def test_without_checksums_the_model_itself_is_the_witness(start: Start, kind: str) -> None:
    two, one = await pair(start, checksums=False), await start()
    await two.prefill.post("/fault", stage="verify", kind=kind, count=5)
    for seed in range(5):
        _, (status, decode) = await two.post("/generate", **ask(64, seed))
        assert status == 200
        assert decode["output_ids"] != await one.tokens(**ask(64, seed))


@pytest.mark.parametrize(
    ("side", "stage"),
    [
        ("prefill", "register"),
        ("prefill", "connect"),
        ("prefill", "verify"),
        ("decode", "resolve-topology"),
        ("decode", "resolve-rank"),
        ("decode", "consume"),
    ],
)
@pytest.mark.parametrize("kind", ["error", "reset", "hang"])
async def test_a_broken_stage_fails_the_room_at_both_ends_in_time(
    start: Start, side: str, stage: str, kind: str
) -> None:
    two = await pair(start, room_s=0.8)
    broken = getattr(two, side)
    await broken.post("/fault", stage=stage, kind=kind)
    legs = [
        asyncio.create_task(leg.post("/generate", **ask(40), **two.triple(77)))
        for leg in (two.prefill, two.decode)
    ]
    if kind == "hang" and stage in ("register", "consume"):
        # nobody but the gateway bounds an engine's own work: it leaves
        await asyncio.wait(legs, timeout=1.5)
        for leg in legs:
            leg.cancel()
    results = await asyncio.gather(*legs, return_exceptions=True)
    mine = results[0 if side == "prefill" else 1]
    assert not (isinstance(mine, tuple) and mine[0] == 200), mine
    if isinstance(mine, tuple):
        assert mine[1]["error"]["room"] == 77
    elif kind == "reset":
        assert isinstance(mine, aiohttp.ClientError)
    await two.idle()
    async with broken.http.delete("/fault"):
        pass  # a room that ended before this stage left the switch armed
    _, (status, _) = await two.post("/generate", **ask(40))
    assert status == 200


async def test_a_delay_is_only_a_delay(start: Start) -> None:
    two = await pair(start)
    for side, stage in ((two.prefill, "verify"), (two.decode, "resolve-rank")):
        await side.post("/fault", stage=stage, kind="delay", seconds=0.1)
    legs = await two.post("/generate", **ask(40))
    assert [status for status, _ in legs] == [200, 200]


async def test_a_decode_whose_client_left_frees_its_pages_and_tells_the_prefill(
    start: Start,
) -> None:
    two = await pair(start)
    room = next(ROOMS)
    body = ask(40) | two.triple(room)
    asking = asyncio.create_task(two.decode.post("/generate", **body))
    await until(lambda: two.decode.engine.open_rooms() == [room])
    await until(lambda: two.prefill.engine.units[0].team.counts()["rooms"] == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await two.idle()
    status, answer = await two.prefill.post("/generate", **body)
    assert (status, answer["error"]["code"]) == (502, "transfer_failed")
    await two.idle()


async def test_a_prefill_whose_client_left_ends_the_decodes_room_at_once(start: Start) -> None:
    two = await pair(start, room_s=20.0)
    room = next(ROOMS)
    body = ask(40) | two.triple(room)
    asking = asyncio.create_task(two.prefill.post("/generate", **body))
    await until(lambda: two.prefill.engine.open_rooms() == [room])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: two.prefill.engine.open_rooms() == [])
    async with asyncio.timeout(5):
        status, answer = await two.decode.post("/generate", **body)
    assert (status, answer["error"]["room"]) == (502, room)
    assert "cancelled" in answer["error"]["message"]
    await two.idle()


async def test_a_dp_rank_is_found_by_its_room_and_by_its_name(start: Start) -> None:
    two, one = await pair(start, dp=2), await start()
    for rooms in (2000, 2001):
        _, (status, decode) = await two.post("/generate", **ask(60, rooms), **two.triple(rooms))
        assert status == 200
        assert decode["output_ids"] == await one.tokens(**ask(60, rooms))
    told = {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}
    legs = await two.post("/generate", **ask(60, 5), **two.triple(2002), **told)
    assert [status for status, _ in legs] == [200, 200]
    for side in (two.prefill, two.decode):
        assert [len(unit.cache.blocks()) for unit in side.engine.units] != [0, 0]
    status, answer = await two.prefill.post(
        "/generate", **ask(60), **two.triple(2004), routed_dp_rank=1
    )
    assert status == 400
    assert "room 2004 belongs to dp rank 0 of 2" in answer["error"]["message"]


async def test_a_prefill_that_takes_turns_tells_its_directory_who_has_a_room_until_it_is_over(
    start: Start,
) -> None:
    two, one = await pair(start, dp=2, load_balance="round_robin"), await start()
    for room in (2000, 2002, 2004):  # all would be dp rank 0's
        _, (status, decode) = await two.post("/generate", **ask(60, room), **two.triple(room))
        assert status == 200, decode
        assert decode["output_ids"] == await one.tokens(**ask(60, room))
    assert all(unit.cache.blocks() for unit in two.prefill.engine.units), "both took a turn"
    async with aiohttp.ClientSession() as session:
        url = f"http://{two.prefill.engine.settings.bootstrap_address}"
        body = {"bootstrap_rooms": [2000, 2002, 2004]}
        async with session.post(f"{url}/query_dp_ranks", json=body) as answer:
            assert await answer.json() == {}, "forgotten when they were over"
        async with session.get(f"{url}/route?prefill_dp_rank=-1&prefill_cp_rank=-1"
                               "&target_tp_rank=-1&target_pp_rank=-1") as answer:  # fmt: skip
            assert (await answer.json())["follow_bootstrap_room"] is False
    await two.idle()


async def test_a_role_without_a_room_or_with_one_twice_says_so(start: Start) -> None:
    two = await pair(start)
    for side in (two.prefill, two.decode):
        status, answer = await side.post("/generate", **ask(20))
        assert (status, answer["error"]["param"]) == (400, "bootstrap_room")
        assert "without bootstrap room id" in answer["error"]["message"]
    status, answer = await two.decode.post("/generate", **ask(20), bootstrap_room=5)
    assert (status, answer["error"]["param"]) == (400, "bootstrap_host")
    asking = asyncio.create_task(two.prefill.post("/generate", **ask(20), bootstrap_room=9))
    await until(lambda: two.prefill.engine.open_rooms() == [9])
    status, answer = await two.prefill.post("/generate", **ask(20), bootstrap_room=9)
    assert (status, answer["error"]["message"]) == (400, "room 9 is at work here already")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_another_model_is_refused_with_the_field_that_differs(start: Start) -> None:
    two = Pair(await start(Role.PREFILL), await start(Role.DECODE, model="other"))
    body = ask(20) | two.triple(next(ROOMS))
    asking = asyncio.create_task(two.prefill.post("/generate", **body))
    status, answer = await two.decode.post("/generate", **body)
    assert (status, answer["error"]["stage"]) == (502, "connect")
    assert "model" in answer["error"]["message"]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_prefill_that_is_not_registered_fails_at_once_by_name(start: Start) -> None:
    two = await pair(start)
    registrar = two.prefill.engine._network._registrar
    registrar._known.clear()
    status, answer = await two.prefill.post("/generate", **ask(20), bootstrap_room=4)
    assert (status, answer["error"]["stage"]) == (502, "register")
    assert "dp rank 0 is not registered at 127.0.0.1" in answer["error"]["message"]

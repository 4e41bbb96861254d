"""Ranks: whatever the two sides' tp, pp and dp are, the tokens are those of one engine."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from kit.pair import ROOMS, Pair, Start, alone, ask, asked, pair, prompt
from kit.wait import until

from kvplane.bootstrap import BootstrapClient
from kvplane.engine.cells import Cell
from kvplane.vocabulary import Role

SHAPES = [  # prefill, decode
    *(({"tp": here}, {"tp": there}) for here in (1, 2, 4) for there in (1, 2)),
    ({"tp": 1}, {"tp": 4}),
    ({"pp": 2}, {"pp": 1}),
    ({"pp": 2}, {"pp": 2}),
    ({"dp": 2}, {"dp": 1}),
    ({"dp": 2}, {"dp": 2}),
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "pp": 2}, {"tp": 4, "pp": 2}),
    ({"tp": 4, "pp": 2, "dp": 2}, {"tp": 2, "dp": 2}),
]


def named(shape: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in shape.items()) or "one"


ONE: dict[tuple[int, ...], list[int]] = {}  # what one engine answers to a prompt


async def same(start: Start, two: Pair, prompts: list[list[int]]) -> None:
    """The pair's tokens are those of one engine."""
    unknown = [ids for ids in prompts if tuple(ids) not in ONE]
    if unknown:
        one = await start(blocks=400)
        for ids in unknown:
            ONE[tuple(ids)] = await one.tokens(**asked(ids, new=12))
    for ids in prompts:
        assert await two.tokens(**asked(ids, new=12)) == ONE[tuple(ids)], len(ids)


@pytest.mark.parametrize(
    ("prefill", "decode"), SHAPES, ids=[f"{named(one)}-to-{named(two)}" for one, two in SHAPES]
)
async def test_every_shape_says_what_one_engine_says(
    start: Start, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    two = Pair(
        *await asyncio.gather(
            start(Role.PREFILL, blocks=400, **prefill), start(Role.DECODE, blocks=400, **decode)
        )
    )
    first = [prompt(tokens, seed) for seed, tokens in enumerate((1, 15, 16, 17, 333, 1500))]
    again = [first[4] + prompt(50, 77), first[4] + prompt(50, 77) + prompt(3, 78)]
    await same(start, two, first + again)  # the last two: both sides hold their beginning
    assert any(unit.cache.hits_tokens for unit in two.decode.engine.units)
    await two.idle()


async def test_a_second_turn_over_ranks_fetches_only_what_is_new(start: Start) -> None:
    two, one = await pair(start, {"tp": 2}, tp=4), await start()
    said = await two.tokens(**ask(100))
    longer = asked(ask(100)["input_ids"] + said + prompt(30, 9), 30)
    assert await two.tokens(**longer) == await one.tokens(**longer)
    assert two.decode.engine.units[0].cache.hits_tokens == 112
    await two.idle()


async def test_ranks_own_their_part_and_nothing_else(start: Start) -> None:
    two = await pair(start, {"tp": 2, "pp": 1}, tp=2, pp=2)
    _, truth = await two.prefill.get("/truth")
    (rank,) = truth["ranks"]
    assert [(shard["tp"], shard["pp"]) for shard in rank["shards"]] == [
        (0, 0), (1, 0), (0, 1), (1, 1),
    ]  # fmt: skip
    assert rank["shards"][3]["regions"] == ["l1.k2", "l1.k3", "l1.v2", "l1.v3"]
    owned = [name for shard in rank["shards"] for name in shard["regions"]]
    assert len(owned) == len(set(owned)) == 16
    ports = [shard["port"] for shard in rank["shards"]]
    assert len(set(ports)) == 4
    async with aiohttp.ClientSession() as session:
        client, address = BootstrapClient(session), two.prefill.engine.settings.bootstrap_address
        topology, _ = await client.topology(address)
        assert (topology.shape.tp, topology.shape.pp, topology.shape.dp) == (2, 2, 1)
        found = [await client.rank(address, 0, 0, tp, pp) for pp in (0, 1) for tp in (0, 1)]
        assert [endpoint.port for endpoint in found] == ports
    _, info = await two.prefill.get("/server_info")
    assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (2, 2, 1)


async def test_a_room_of_many_ranks_reads_as_one(start: Start) -> None:
    two = await pair(start, {"tp": 2}, tp=4)
    room = next(ROOMS)
    assert await two.tokens(**ask(40), **two.triple(room))
    seen = {}
    for side in (two.prefill, two.decode):
        _, found = await side.get(f"/rooms/{room}")
        assert all(stage["outcome"] == "ok" for stage in found["stages"])
        seen[side.engine.settings.role] = [stage["stage"] for stage in found["stages"]]
        details = {stage["stage"]: stage["detail"] for stage in found["stages"]}
        assert all(f"tp={rank}: 127.0.0.1:" in details["connect"] for rank in (0, 1)), details
    assert seen == {
        Role.PREFILL: ["register", "connect", "verify"],
        Role.DECODE: ["resolve-topology", "resolve-rank", "connect", "verify", "consume"],
    }


WRONG = ["flip-byte", "swap-pages", "foreign-room", "short", "stale-generation"]


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("tp", "rank", "names"), [(2, "tp=1", "tp=1"), (4, "tp=1", "tp=0")])
async def test_wrong_data_of_one_rank_fails_the_room_and_is_named(
    start: Start, kind: str, tp: int, rank: str, names: str
) -> None:
    two = await pair(start, {"tp": 2}, tp=tp)
    status, said = await two.prefill.post("/fault", stage="verify", kind=kind, rank=rank)
    assert status == 200, said
    room = next(ROOMS)
    legs = await two.post("/generate", **ask(100), **two.triple(room))
    for status, answer in legs:
        assert status == 502, answer
        assert (answer["error"]["stage"], answer["error"]["room"]) == ("verify", room)
    message = legs[1][1]["error"]["message"]
    assert f"rank {names}: prefill tp=1: " in message, message
    assert "prefill tp=1: " in legs[0][1]["error"]["message"], legs[0]
    _, evidence = await two.decode.get(f"/rooms/{room}")
    failed = [stage for stage in evidence["stages"] if stage["outcome"] == "failed"]
    assert [stage["stage"] for stage in failed] == ["verify"], evidence
    port = two.prefill.engine.units[0].team.ranks[1].port
    for said in (f"rank {names}: ", f"127.0.0.1:{port}: ", "prefill tp=1: "):
        assert said in failed[0]["detail"], failed
    assert two.decode.engine.units[0].cache.blocks() == []
    await two.idle()
    assert (await two.post("/generate", **ask(100)))[1][0] == 200


async def test_a_fault_of_a_rank_that_is_not_there_or_of_all_is_refused(start: Start) -> None:
    two = await pair(start, tp=2)
    for rank, stage, names in (
        ("tp=2", "verify", "must be tp=0, tp=1"),
        ("tp=1", "register", "stage register is of all ranks"),
        (1, "verify", "must be tp=0, tp=1"),
    ):
        status, answer = await two.prefill.post("/fault", stage=stage, kind="error", rank=rank)
        assert (status, answer["error"]["param"]) == (400, "rank")
        assert names in answer["error"]["message"]


async def test_a_rank_that_is_not_registered_fails_the_room_at_once_by_name(start: Start) -> None:
    two = await pair(start, tp=4)
    del two.prefill.engine._network._registrar._known[Cell(0, 0, 3)]
    status, answer = await two.prefill.post("/generate", **ask(20), bootstrap_room=4)
    assert (status, answer["error"]["stage"]) == (502, "register")
    assert "register: 3 of 4, missing tp=3: rank tp=3 is not" in answer["error"]["message"]
    assert "missing tp=3" in (two.prefill.engine.not_ready() or "")


async def test_one_dead_rank_port_fails_the_room_by_name_and_holds_no_page(start: Start) -> None:
    two = await pair(start, {"tp": 2}, tp=4, room_s=5.0)
    dead = two.prefill.engine.units[0].team.ranks[3]
    await dead.offers.close()
    room = next(ROOMS)
    legs = await two.post("/generate", **ask(60), **two.triple(room))
    assert [status for status, _ in legs] == [502, 502], legs
    error = legs[1][1]["error"]
    assert (error["stage"], error["room"]) == ("connect", room)
    assert f"rank tp=1: prefill tp=3: 127.0.0.1:{dead.port} is gone" in error["message"], error
    await two.idle()


@pytest.mark.parametrize("kind", ["hang", "reset", "error"])
@pytest.mark.parametrize("stage", ["connect", "verify"])
async def test_one_rank_that_hangs_or_breaks_ends_the_room_in_time_on_all(
    start: Start, kind: str, stage: str
) -> None:
    two = await pair(start, {"tp": 2}, tp=2, room_s=0.8)
    await two.prefill.post("/fault", stage=stage, kind=kind, rank="tp=1")
    legs = await two.post("/generate", **ask(60))
    assert [status for status, _ in legs] == [502, 502], legs
    assert "rank tp=1: " in legs[1][1]["error"]["message"], legs[1]
    await two.idle()
    assert (await two.post("/generate", **ask(60)))[1][0] == 200


async def test_a_client_that_leaves_frees_the_pages_of_every_rank(start: Start) -> None:
    two = await pair(start, {"tp": 2}, tp=2)
    room = next(ROOMS)
    body = ask(40) | two.triple(room)
    asking = asyncio.create_task(two.decode.post("/generate", **body))
    await until(lambda: two.prefill.engine.units[0].team.counts()["rooms"] == 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await two.idle()
    status, answer = await two.prefill.post("/generate", **body)
    assert (status, answer["error"]["code"]) == (502, "transfer_failed")
    await two.idle()


async def test_sides_that_cannot_meet_are_refused_with_the_field(start: Start) -> None:
    two = await pair(start, {"pp": 2}, room_s=1.0)
    legs = await two.post("/generate", **ask(20))
    status, answer = legs[1]
    assert (status, answer["error"]["stage"]) == (502, "resolve-topology")
    assert "pp: prefill 1, decode 2, must be equal or 1" in answer["error"]["message"]


async def test_a_decode_that_queues_for_pages_keeps_the_prefills_of_every_rank(
    start: Start,
) -> None:
    """FR-TR-05: the queue is longer than the lease; the lease is renewed as long as it lasts."""
    two = await pair(start, {"tp": 2, "blocks": 8, "queue_s": 30.0}, tp=4, room_s=1.0)
    cache = two.decode.engine.units[0].cache
    taken = cache.lease([1] * 100, 28)
    assert taken is not None
    asking = asyncio.create_task(two.post("/generate", **ask(60)))
    await until(lambda: two.prefill.engine.units[0].team.counts()["rooms"] == 4)
    began = asyncio.get_running_loop().time()
    await until(lambda: asyncio.get_running_loop().time() > began + 1.6)
    assert not asking.done()
    two.decode.engine.units[0].give_back(taken)
    assert [status for status, _ in await asking] == [200, 200]
    await two.idle()


@pytest.mark.parametrize(
    "told", [{"host": "::1"}, {"host": "0.0.0.0", "advertise_host": "127.0.0.1"}], ids=str
)
async def test_ranks_are_dialled_where_they_say_whatever_they_bind(
    start: Start, told: dict[str, str]
) -> None:
    two, one = await pair(start, tp=2, bootstrap_host="127.0.0.1", **told), await start()
    assert await two.tokens(**ask(40)) == await one.tokens(**ask(40))
    host = told.get("advertise_host", "::1")
    address = two.prefill.engine.settings.bootstrap_address
    async with aiohttp.ClientSession() as session:
        assert (await BootstrapClient(session).rank(address, 0, 0, 1, 0)).host == host


async def test_a_prefill_that_is_replaced_ends_the_rooms_that_wait_for_it(start: Start) -> None:
    """FR-TR-07: the heartbeat heard of it; nobody waits for the deadline."""
    two = await pair(start, {"tp": 2}, room_s=30.0)
    room = next(ROOMS)
    address = two.prefill.engine.settings.bootstrap_address
    asking = asyncio.create_task(two.decode.post("/generate", **ask(40), **two.triple(room)))
    await until(lambda: two.decode.engine.units[0].team.counts()["landings"] == 2)
    await until(lambda: two.prefill.engine.units[0].team.counts()["rooms"] == 1)
    two.decode.engine._network._gone(address, None, "replaced by another life")
    status, answer = await asyncio.wait_for(asking, 5)
    assert (status, answer["error"]["room"]) == (502, room)
    assert "replaced by another life" in answer["error"]["message"]
    await two.idle()


async def test_pages_and_tokens_are_right_whatever_breaks_in_which_rank(start: Start) -> None:
    """60 rooms at once and again, every kind of fault in any rank: right tokens or a named end."""
    two = await pair(start, {"tp": 2}, tp=4, room_s=6.0)  # a busy machine needs seconds for all
    chance = random.Random(3)
    kinds = ["flip-byte", "swap-pages", "foreign-room", "short", "stale-generation", "error",
             "reset", "delay", "hang"]  # fmt: skip
    for kind in kinds * 2:
        stage = "connect" if kind in ("error", "reset") and chance.random() < 0.5 else "verify"
        rank = f"tp={chance.randrange(4)}"
        told = {"stage": stage, "kind": kind, "rank": rank, "seconds": 0.05}
        assert (await two.prefill.post("/fault", **told))[0] == 200
    asks = [prompt(chance.randrange(20, 120), seed) for seed in range(60)]
    legs = await asyncio.gather(*(two.post("/generate", **asked(ids, 3)) for ids in asks))
    failed = [answer["error"] for _, (status, answer) in legs if status != 200]
    assert 0 < len(failed) <= 18, failed
    assert all(error["stage"] in ("connect", "verify") for error in failed), failed
    for ids, (_, (status, answer)) in zip(asks, legs, strict=True):
        assert status != 200 or answer["output_ids"] == alone(ids, 3)
    await two.prefill.http.delete("/fault")
    await two.idle()
    for ids in asks[:20]:
        assert await two.tokens(**asked(ids, 3)) == alone(ids, 3)
    await two.idle()


async def test_ranks_register_with_the_key_of_their_directory(start: Start) -> None:
    two = await pair(start, tp=2, bootstrap_key="s3cret")
    assert await two.tokens(**ask(20)) == alone(ask(20)["input_ids"], 24)
    assert "s3cret" not in repr(two.prefill.engine.settings)
    at = {"bootstrap_port": two.prefill.engine.settings.bootstrap_port}
    stranger = await start(Role.PREFILL, ready=False, bootstrap_key="guess", **at)
    await until(lambda: "401" in (stranger.engine.not_ready() or ""))
    assert await two.tokens(**ask(20)) == alone(ask(20)["input_ids"], 24)


async def test_a_backend_is_one_setting_on_both_sides(start: Start) -> None:
    two = await pair(start, {"tp": 2}, tp=4, backend="fake", room_s=2.0)
    assert await two.tokens(**ask(100)) == alone(ask(100)["input_ids"], 24)
    _, info = await two.prefill.get("/server_info")
    assert info["disaggregation_transfer_backend"] == "fake"
    other = Pair(two.prefill, await start(Role.DECODE, backend="tcp"))
    (status, _), (_, answer) = await other.post("/generate", **ask(20))
    assert status == 502
    assert "backend fake here, tcp there" in answer["error"]["message"], answer

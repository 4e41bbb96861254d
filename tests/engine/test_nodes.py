"""Nodes: a prefill in several processes says what one engine says, and names a node that is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit.pair import ROOMS, Pair, Start, ask, asked, pair, prompt
from kit.ports import free_port
from kit.wait import until

from kvplane.engine.questions import BadQuestion, question, ranks, room_told
from kvplane.vocabulary import Role


async def split(
    start: Start, nnodes: int = 2, decode: dict[str, Any] | None = None, **told: Any
) -> tuple[Pair, list[Any]]:
    """A pair whose prefill runs on so many nodes, and the nodes that follow."""
    told |= {"nnodes": nnodes, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    engines = await asyncio.gather(
        start(Role.PREFILL, **told),
        *(follower(start, node, **told) for node in range(1, nnodes)),
        start(Role.DECODE, **(decode or {})),
    )
    return Pair(engines[0], engines[-1]), engines[1:-1]


async def follower(start: Start, node: int, **told: Any) -> Any:
    return await start(Role.PREFILL, **(told | {"node_rank": node, "bootstrap_port": 1}))


async def idle(two: Pair, followers: list[Any]) -> None:
    await two.idle()
    for node in followers:
        await Pair(node, two.decode).idle()


@pytest.mark.parametrize(
    ("nnodes", "prefill", "decode"),
    [
        (2, {"tp": 4}, {"tp": 2}),
        (2, {"tp": 2, "pp": 2}, {}),
        (4, {"tp": 4, "dp": 2}, {"tp": 4}),
    ],
    ids=["2-nodes-tp4-to-tp2", "2-nodes-tp2-pp2-to-one", "4-nodes-tp4-dp2-to-tp4"],
)
async def test_nodes_together_say_what_one_engine_says(
    start: Start, nnodes: int, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    (two, followers), one = await split(start, nnodes, decode, **prefill), await start()
    prompts = [prompt(tokens, tokens) for tokens in (1, 16, 333, 1000)]
    for ids in (*prompts, prompts[2] + prompt(40, 1)):  # the last one: all hold its beginning
        assert await two.tokens(**asked(ids, 12)) == await one.tokens(**asked(ids, 12))
    hits = [sum(unit.cache.hits_tokens for unit in node.engine.units) for node in followers]
    assert all(hits), hits
    await idle(two, followers)


async def test_each_node_owns_its_ranks_and_only_node_0_answers(start: Start) -> None:
    two, (node,) = await split(start, tp=4)
    for side, own in ((two.prefill, [0, 1]), (node, [2, 3])):
        _, truth = await side.get("/truth")
        assert [shard["tp"] for shard in truth["ranks"][0]["shards"]] == own
    status, answer = await node.post("/generate", **ask(20), bootstrap_room=5)
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert "node 1 answers no requests: ask node 0" in answer["error"]["message"]
    assert await node.get("/health") == (200, "OK")
    assert await two.prefill.get("/health") == (200, "OK")


async def test_a_fault_on_another_node_is_named_with_node_and_rank(start: Start) -> None:
    two, followers = await split(start, tp=4)
    await followers[0].post("/fault", stage="verify", kind="flip-byte", rank="tp=3")
    room = next(ROOMS)
    legs = await two.post("/generate", **ask(60), **two.triple(room))
    assert [status for status, _ in legs] == [502, 502]
    assert "prefill tp=3: checksum mismatch" in legs[1][1]["error"]["message"]
    assert all(answer["error"]["stage"] == "verify" for _, answer in legs), legs
    _, found = await two.prefill.get(f"/rooms/{room}")
    (failed,) = (stage for stage in found["stages"] if stage["outcome"] == "failed")
    assert "prefill tp=3: checksum mismatch" in failed["detail"], failed
    await idle(two, followers)
    assert await two.tokens(**ask(60))


async def test_one_node_that_hangs_is_the_one_that_is_named(start: Start) -> None:
    two, followers = await split(start, tp=2, room_s=5.0, decode={"room_s": 1.0})
    await followers[0].post("/fault", stage="verify", kind="hang", rank="tp=1")
    legs = await two.post("/generate", **ask(60))
    for status, answer in legs:
        assert (status, answer["error"]["stage"]) == (502, "verify")
        assert "prefill tp=1" in answer["error"]["message"], legs
    await idle(two, followers)


async def test_a_node_that_never_came_is_named_everywhere(start: Start) -> None:
    at = f"127.0.0.1:{free_port()}"
    prefill = await start(Role.PREFILL, ready=False, tp=4, nnodes=2, dist_init_addr=at)
    said = f"2 of 4, missing tp=2, tp=3: node 1 of 2 (tp=2, tp=3) has not joined at {at} yet"
    await until(lambda: prefill.engine.not_ready() == said, what=said)
    for path in ("/health", "/ready"):
        status, answer = await prefill.get(path)
        assert status == 503 and said in answer["error"]["message"], answer
    status, answer = await prefill.post("/generate", **ask(20), bootstrap_room=9)
    assert (status, answer["error"]["message"]) == (502, f"room 9, register: {said}")


async def test_a_node_that_goes_is_named_and_comes_back_without_a_restart_of_node_0(
    start: Start,
) -> None:
    told = {"tp": 4, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}", "room_s": 20.0}
    two, one = await pair(start, {"tp": 2, "nnodes": 1}, **told, ready=False), await start()
    first = await follower(start, 1, **told)
    await until(lambda: two.prefill.engine.not_ready() is None)
    room = next(ROOMS)
    going = asyncio.create_task(two.prefill.post("/generate", **ask(40), **two.triple(room)))
    await until(lambda: room in first.engine.open_rooms())
    await first.engine.stop()
    status, answer = await asyncio.wait_for(going, 5)
    assert (status, answer["error"]["room"]) == (502, room)
    gone = "node 1 of 2 (tp=2, tp=3)"
    assert gone in answer["error"]["message"], answer
    said = f"2 of 4, missing tp=2, tp=3: {gone} is gone: connection closed"
    await until(lambda: two.prefill.engine.not_ready() == said, what=said)
    status, answer = await two.prefill.post("/generate", **ask(40), bootstrap_room=next(ROOMS))
    assert (status, answer["error"]["stage"]) == (502, "register") and gone in str(answer)
    second = await follower(start, 1, **told)
    await until(lambda: two.prefill.engine.not_ready() is None)
    assert await two.tokens(**ask(40)) == await one.tokens(**ask(40))
    await idle(two, [second])


async def test_node_0_comes_back_under_another_life_and_the_others_go_with_it(
    start: Start,
) -> None:
    two, (node,) = await split(start, tp=2)
    settings = two.prefill.engine.settings
    await two.prefill.engine.stop()
    await until(lambda: "node 0 at" in (node.engine.not_ready() or ""))
    again = await start(
        Role.PREFILL, tp=2, nnodes=2, dist_init_addr=settings.dist_init_addr,
        bootstrap_port=settings.bootstrap_port,
    )  # fmt: skip
    await until(lambda: node.engine.not_ready() is None)
    assert again.engine.generation != two.prefill.engine.generation
    assert await Pair(again, two.decode).tokens(**ask(40))


async def test_a_node_that_is_cut_otherwise_is_not_welcome_and_says_why(start: Start) -> None:
    at = f"127.0.0.1:{free_port()}"
    told = {"tp": 2, "nnodes": 2, "dist_init_addr": at, "ready": False}
    await start(Role.PREFILL, **told)
    node = await follower(start, 1, **told, model="other")
    said = f"node 1 of 2 (tp=1): node 0 at {at} refused: model: other there, tiny at node 0"
    await until(lambda: node.engine.not_ready() == said, what=said)


async def test_a_client_that_leaves_ends_the_room_on_every_node(start: Start) -> None:
    two, followers = await split(start, tp=2)
    room = next(ROOMS)
    asking = asyncio.create_task(two.prefill.post("/generate", **ask(40), **two.triple(room)))
    await until(lambda: room in followers[0].engine.open_rooms())
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not followers[0].engine.open_rooms())
    status, answer = await two.decode.post("/generate", **ask(40), **two.triple(room))
    assert (status, answer["error"]["room"]) == (502, room)
    await idle(two, followers)


@pytest.mark.parametrize("junk", [b"", b"\x00" * 40, b"\x81\xa1t\xa5other", b"\x81\xa1t\xa4room"])
def test_what_is_no_question_or_answer_is_one_kind_of_error(junk: bytes) -> None:
    for read in (question, ranks, room_told):
        if read is room_told and junk.endswith(b"room"):
            continue  # an answer whose members all have their default
        with pytest.raises(BadQuestion):
            read(junk)

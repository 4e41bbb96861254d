"""API: what operators meet beside the recorded transcripts; real sockets, one connection."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from kit.directory import Seat, rank, serving


async def test_nothing_is_told_before_every_rank_is_in(seat: Seat) -> None:  # FR-BS-01
    said = "register: no rank yet"
    for count, tp in enumerate((0, 1, 3, 2)):
        for reply in (await seat.get(), await seat.get(0, 0, 0, 0)):
            assert reply.status == 503
            assert reply.text == (
                f"Prefill server not fully registered yet ({count} workers registered)."
            )
        assert (await seat.ranks())["summary"] == said
        assert (await seat.put(attn_tp_size=4, attn_tp_rank=tp, rank_port=40000 + tp)).status == 200
        missing = ", ".join(f"tp={tp}" for tp in sorted((0, 1, 3, 2)[count + 1 :]))
        said = f"register: {count + 1} of 4, missing {missing}"
    assert (await seat.get()).status == 200
    assert (await seat.get(0, 0, 2, 0)).json() == {"rank_ip": "10.0.0.1", "rank_port": 40002}
    table = await seat.ranks()
    assert (table["summary"], table["complete"]) == ("register: 4 of 4", True)


async def test_the_missing_rank_is_named(seat: Seat) -> None:  # FR-BS-01
    for tp in (0, 1, 3):
        await seat.put(attn_tp_size=4, attn_tp_rank=tp)
    table = await seat.ranks()
    assert table["summary"] == "register: 3 of 4, missing tp=2"
    assert table["missing"] == [{"dp": 0, "cp": 0, "tp": 2, "pp": 0}]
    assert (table["registered"], table["expected"]) == (3, 4)


async def test_a_big_instance_lists_some_and_counts_all(seat: Seat) -> None:
    await seat.put(attn_tp_size=1024, attn_dp_size=8)
    table = await seat.ranks()
    assert (len(table["missing"]), table["missing_count"]) == (100, 8191)
    assert table["summary"].endswith("dp=0 tp=5 and 8186 more")


async def test_the_second_read_after_a_restart_gives_new_ports_only(seat: Seat) -> None:  # FR-BS-03
    for tp, port in ((0, 1), (1, 2)):
        await seat.put(attn_tp_size=2, attn_tp_rank=tp, rank_port=port)
    before = (await seat.get()).headers["x-kvplane-generation"]
    seen = set()
    for tp, port in ((0, 3), (1, 4)):
        await seat.put(attn_tp_size=2, attn_tp_rank=tp, rank_port=port)
        seen.add((await seat.get()).headers["x-kvplane-generation"])
    assert [(await seat.get(0, 0, tp, 0)).json()["rank_port"] for tp in (0, 1)] == [3, 4]
    assert len(seen) == 1
    assert before not in seen


@pytest.mark.parametrize("kind", ["attn", "system"])
async def test_both_kinds_of_data_parallelism_give_two_groups(seat: Seat, kind: str) -> None:
    for dp in (0, 1):  # FR-BS-06
        await seat.put(**{f"{kind}_dp_size": 2, f"{kind}_dp_rank": dp}, rank_port=100 + dp)
    assert (await seat.get()).json()["dp_size"] == 2
    assert [(await seat.get(dp, 0, 0, 0)).json()["rank_port"] for dp in (0, 1)] == [100, 101]


async def test_a_room_leads_to_the_rank_it_was_told_and_unknown_ones_are_absent(
    seat: Seat,
) -> None:  # FR-BS-07
    told = json.dumps({"bootstrap_room": 10, "dp_rank": 3}).encode()
    assert (await seat.wire.call("POST", "/register_dp_rank", told)).status == 200
    asked = json.dumps({"bootstrap_rooms": [10, 11]}).encode()
    assert (await seat.wire.call("POST", "/query_dp_ranks", asked)).json() == {"10": 3}


async def test_bad_input_is_the_callers_error_and_changes_nothing(seat: Seat) -> None:  # FR-BS-14
    await seat.put()
    before = await seat.ranks()
    call = seat.wire.call
    missing = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0"
    replies = [
        await call("GET", missing),
        await seat.get(0, 0, 99, 0),
        await seat.get(0, 0, "x", 0),
        await call("PUT", "/route", b"{"),
        await seat.put(attn_tp_rank=...),
        await seat.put(rank_port="70000"),
        await call("DELETE", "/route"),
    ]
    assert [reply.status for reply in replies] == [400, 404, 400, 400, 400, 400, 405]
    assert "attn_tp_rank" in replies[4].text
    assert "rank_port '70000': must be a port" in replies[5].text
    assert await seat.ranks() == before


@pytest.mark.parametrize("body", [
    b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"1e999", b'"' + b"x" * 9000,
    json.dumps(rank(rank_port=float("inf"))).encode(),
    json.dumps(rank(pp_rank=float("nan"))).encode(),
    b'{"attn_tp_size":' + b"9" * 5000 + b"}",
])  # fmt: skip
async def test_garbage_is_refused_and_the_directory_goes_on(seat: Seat, body: bytes) -> None:
    for method, path in (
        ("PUT", "/route"), ("POST", "/register_dp_rank"), ("POST", "/query_dp_ranks"),
    ):  # fmt: skip
        reply = await seat.wire.call(method, path, body)
        assert reply.status == 400, (path, reply.text)
        assert len(reply.text) < 400
    assert (await seat.put()).status == 200
    assert seat.wire.opened == 1


async def test_a_body_that_is_too_long_is_not_read_to_its_end() -> None:
    async with serving(most_body_bytes=1000) as seat:
        body = json.dumps(rank(note="x" * 2000)).encode()
        reply = await seat.wire.call("PUT", "/route", body)
        assert (reply.status, reply.text) == (413, "body: must be at most 1000 bytes")
        assert (await seat.put()).status == 200


async def test_a_body_that_never_ends_is_given_up() -> None:
    async with serving(body_s=0.05) as seat:
        reader, writer = await asyncio.open_connection("127.0.0.1", seat.port)
        try:
            writer.write(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            head = await asyncio.wait_for(reader.readline(), 5)
            assert b"408" in head
        finally:
            writer.close()
            await writer.wait_closed()
        assert (await seat.put()).status == 200


async def test_the_generation_of_a_rank_is_told_on_every_answer(seat: Seat) -> None:
    first = await seat.wire.call("GET", "/health")
    await seat.put(generation="life-7")
    for method, path in (("GET", "/health"), ("GET", "/nope"), ("DELETE", "/route")):
        reply = await seat.wire.call(method, path)
        assert (
            reply.headers["x-kvplane-generation"]
            == "life-7"
            != first.headers["x-kvplane-generation"]
        )
    assert "generation" not in (await seat.get()).json(), "the engines' records are closed"


async def test_a_generation_may_come_as_a_header_and_a_late_one_is_a_conflict(seat: Seat) -> None:
    body = json.dumps(rank()).encode()
    for life, status in (("a", 200), ("b", 200), ("a", 409), ("b", 200), ("a b", 400)):
        reply = await seat.wire.call("PUT", "/route", body, {"x-kvplane-generation": life})
        assert reply.status == status, (life, reply.text)
    assert (await seat.ranks())["generation"] == "b"


async def test_a_takeover_is_logged_with_old_and_new_owner(
    seat: Seat, caplog: pytest.LogCaptureFixture
) -> None:  # FR-BS-05, the part without a key
    await seat.put(rank_ip="10.0.0.1", rank_port=1)
    with caplog.at_level(logging.WARNING):
        await seat.put(rank_ip="10.6.6.6", rank_port=2)
    assert "address=10.6.6.6:2" in caplog.text
    assert "replaced=10.0.0.1:1" in caplog.text


async def test_metrics_are_there_when_a_registry_is_given() -> None:
    async with serving(metrics=True) as seat:
        await seat.put(attn_tp_size=2, rank_port=1)
        await seat.put(attn_tp_size=2, rank_port=2)
        await seat.put(attn_tp_size=2, rank_port="x")
        await seat.put(attn_tp_size=2, attn_tp_rank=1, page_size=32)
        told = json.dumps({"bootstrap_room": 10, "dp_rank": 3}).encode()
        await seat.wire.call("POST", "/register_dp_rank", told)
        for path in ("/a", "/b"):
            await seat.wire.call("GET", path)
        text = (await seat.wire.call("GET", "/metrics")).text
    for line in (
        'requests_total{route="/route",status="200"} 3.0',
        'requests_total{route="/route",status="400"} 1.0',
        'requests_total{route="other",status="404"} 2.0',
        "lives_total 1.0", "takeovers_total 1.0", "differing_total 1.0", "rooms 1.0",
    ):  # fmt: skip
        assert f"kvplane_bootstrap_{line}" in text, line

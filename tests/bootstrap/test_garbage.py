"""Garbage: whatever comes on the socket is refused or closed, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from kit.directory import Seat, rank, serving

BODIES = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "null bytes": b"\x00" * 100,
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "deep and closed": b"[" * 900 + b"]" * 900,
    "not a number": b"NaN",
    "infinite": b"1e999",
    "minus infinite": b"[-Infinity]",
    "long text": b'"' + b"x" * 9000,
    "long number": b'{"attn_tp_size":' + b"9" * 5000 + b"}",
    "half a character": b'{"attn_tp_size": "\xc3"}',
    "many members": json.dumps({str(i): i for i in range(20_000)}).encode(),
    "utf-16": json.dumps(rank()).encode("utf-16-be")[1:],
    "two values": b"{} {}",
    "half a pair": b'"\\ud800"',
    "comment": b"// {}",
    "a list of ranks": json.dumps([rank()] * 10).encode(),
    "form": b"attn_tp_size=1&attn_tp_rank=0",
}
PUT, GET = (b"%s HTTP/1.1\r\nHost: a\r\n" % what for what in (b"PUT /route", b"GET /ranks"))
WIRES = {
    "tls": bytes.fromhex("160301020001000001fc0303") + b"\x00" * 500,
    "zmq": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 48,
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": b"\x00" * 4096,
    "no such method": b"\xe2\x82\xac /route HTTP/1.1\r\n\r\n",
    "no version": b"GET /route\r\n\r\n",
    "null in a header": GET + b"X: a\x00b\r\n\r\n",
    "folded header": GET + b" folded\r\n\r\n",
    "negative length": PUT + b"Content-Length: -1\r\n\r\n",
    "huge length": PUT + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "two lengths": PUT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "bad chunk": PUT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "huge chunk": PUT + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n",
    "smuggled": PUT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\n" + GET + b"\r\n",
}


async def raw(seat: Seat, sent: bytes) -> bytes:
    """What comes back until the other side closes, or has said its last for now."""
    reader, writer = await asyncio.open_connection("127.0.0.1", seat.port)
    found = b""
    try:
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(10):
            found = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return found


async def unharmed(seat: Seat) -> None:
    assert (await seat.get(0, 0, 0, 0)).json() == {"rank_ip": "10.0.0.1", "rank_port": 40000}
    assert seat.wire.opened == 1, "the connection of somebody else went on"


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_means_nothing_is_refused_and_counted(name: str) -> None:
    """FR-BS-14, for every route that takes a body."""
    async with serving(metrics=True) as seat:
        await seat.put()
        before = await seat.ranks()
        for method, path in (
            ("PUT", "/route"), ("POST", "/register_dp_rank"), ("POST", "/query_dp_ranks"),
            ("POST", "/forget_rooms"), ("PUT", "/register_transfer_engine_info"),
        ):  # fmt: skip
            reply = await seat.wire.call(method, path, BODIES[name])
            assert reply.status in (400, 422), (path, reply.text)
            assert len(reply.text) < 600
        text = (await seat.wire.call("GET", "/metrics")).text
        assert 'kvplane_bootstrap_refused_total{reason="input"} 5.0' in text
        assert await seat.ranks() == before
        await unharmed(seat)


@pytest.mark.parametrize("name", WIRES)
async def test_what_is_no_request_is_closed(seat: Seat, name: str) -> None:
    await seat.put()
    before = await seat.ranks()
    answer = await raw(seat, WIRES[name])
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert b" 500 " not in answer
    assert await seat.ranks() == before
    await unharmed(seat)


async def test_random_bytes_harm_nobody(seat: Seat) -> None:
    await seat.put()
    dice = random.Random(7)
    good = PUT + b"Content-Length: 400\r\n\r\n" + json.dumps(rank()).encode()
    for _ in range(60):
        broken = bytearray(good)
        for _ in range(dice.randint(1, 8)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        await raw(seat, bytes(broken[: dice.randint(1, len(broken))]))
    await unharmed(seat)


async def test_a_request_that_comes_byte_by_byte_is_a_request(seat: Seat) -> None:
    body = json.dumps(rank()).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", seat.port)
    for byte in PUT + b"Content-Length: %d\r\n\r\n" % len(body) + body:
        writer.write(bytes([byte]))
        await writer.drain()
    assert b"200" in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    await unharmed(seat)


@pytest.mark.parametrize(("members", "field"), [
    ({"kv_cache_dtype": "a\x00b"}, "kv_cache_"), ({"kv_cache_dtype": "a\nb"}, "kv_cache_"),
    ({"kv_cache_dtype": "\ud800"}, "kv_cache_dtype"), ({"kv_cache_dtype": "x" * 2000}, "kv_cache_"),
    ({"rank_ip": "10.0.0.1\x00"}, "rank_ip"), ({"rank_ip": "h\r\nx-evil: 1"}, "rank_ip"),
    ({"rank_port": 10**400}, "rank_port"), ({"rank_port": "9" * 4500}, "rank_port"),
    ({"attn_tp_size": 2**63}, "attn_tp_size"), ({"page_size": 1e300}, "page_size"),
    ({"generation": "a\r\nx-evil: 1"}, "generation"), ({"generation": "ü"}, "generation"),
    ({"dsv41_spec_layout": {"a": "x" * 5000}}, "dsv41_spec_layout"),
    ({"dsv41_spec_layout": {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}}, "dsv41_spec_layout"),
    ({"dsv41_spec_layout": {"a": float("inf")}}, "body"),
])  # fmt: skip
async def test_a_hostile_member_is_named_and_travels_nowhere(
    seat: Seat, members: dict[str, Any], field: str
) -> None:
    await seat.put()
    reply = await seat.put(**members)
    assert (reply.status, reply.text.startswith(field)) == (400, True), reply.text
    assert len(reply.text) < 400
    assert "x-evil" not in reply.headers
    await unharmed(seat)


async def test_a_number_that_json_cannot_write_is_found_inside_an_object(seat: Seat) -> None:
    body = json.dumps(rank(dsv41_spec_layout={"a": 1})).replace('"a": 1', '"a": 1e999')
    reply = await seat.wire.call("PUT", "/route", body.encode())
    assert (reply.status, reply.text.startswith("dsv41_spec_layout ")) == (400, True)


async def test_strange_headers_and_paths_are_no_server_errors(seat: Seat) -> None:
    await seat.put()
    for headers in (
        {"x-kvplane-generation": "x" * 200}, {"x-kvplane-generation": "\x7f"},
        {"Prefer": "wait=" + "9" * 9000}, {"Prefer": ",;=,=;"}, {"Authorization": "\xff" * 500},
        {"Content-Type": "x" * 5000}, {"Transfer-Encoding": "identity"}, {f"X-{'y' * 999}": "z"},
    ):  # fmt: skip
        raw_rank = json.dumps(rank()).encode()
        reply = await seat.wire.call("PUT", "/route", raw_rank, headers)
        assert reply.status in (200, 400)
        assert (await seat.wire.call("GET", "/health")).status == 200
    for path in ("/%00", "/route%2f", "/" + "a" * 9000, "//route", "/ranks/../route", "*", "/ü"):
        reply = await seat.wire.call("GET", path)
        assert reply.status in (400, 404), path
    assert (await seat.get(0, 0, 0, 0)).status == 200


async def test_instances_of_any_size_leave_the_table_as_small_as_the_first() -> None:
    """Claims of other sizes cannot grow it: a place outside the grid is refused."""
    async with serving() as seat:
        await seat.put(attn_tp_size=2)
        for size in range(3, 40):
            assert (await seat.put(attn_tp_size=size, attn_tp_rank=size - 1)).status == 400
        for i in range(30):
            await seat.put(attn_tp_size=2, attn_tp_rank=1, page_size=1 + i, rank_port=1 + i)
        table = await seat.ranks()
        assert len(table["ranks"]) <= 2
        assert len(table["differing"]) <= 16
        assert len(table["takeovers"]) <= 100

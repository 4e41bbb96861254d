"""Smuggling: two readings of one request, and paths that mean another: neither passes the door."""

from __future__ import annotations

import asyncio
import json

from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import answer, replies
from kit.wait import until

GOOD = replies(answer(b"{}"))
ENGINES = {"p1": GOOD, "d1": GOOD}
LINE = b"POST /generate HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"text":"x"}'
LAST = b"connection: close\r\n"
HIDDEN = LINE + LAST + b'content-length: 17\r\n\r\n{"text":"hidden"}'
CHUNKS = b"transfer-encoding: chunked\r\n"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


async def tell(house: Gatehouse, raw: bytes) -> bytes:
    """All that comes back on one connection until it is closed."""
    host, _, port = house.url[7:].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    found = b""
    try:
        writer.write(raw)
        async with asyncio.timeout(20):
            while data := await reader.read(65536):
                found += data
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return found


def seen(house: Gatehouse) -> list[bytes]:
    return [r for engine in house.engines.values() for r in engine.requests]


AMBIGUOUS = {
    "both lengths": LINE + CHUNKS + b"content-length: 12\r\n\r\n" + chunked(BODY),
    "both, length first": LINE + b"content-length: 5\r\n" + CHUNKS + b"\r\n" + chunked(BODY),
    "two lengths": LINE + b"content-length: 12\r\ncontent-length: 99\r\n\r\n" + BODY,
    "two equal lengths": LINE + b"content-length: 12\r\ncontent-length: 12\r\n\r\n" + BODY,
    "a list of lengths": LINE + b"content-length: 12, 99\r\n\r\n" + BODY,
    "negative": LINE + b"content-length: -12\r\n\r\n" + BODY,
    "signed": LINE + b"content-length: +12\r\n\r\n" + BODY,
    "hex": LINE + b"content-length: 0xc\r\n\r\n" + BODY,
    "beyond 64 bit": LINE + b"content-length: 36893488147419103244\r\n\r\n" + BODY,
    "blank before the colon": LINE + b"content-length : 12\r\n\r\n" + BODY,
    "tab before the colon": LINE + b"transfer-encoding\t: chunked\r\n\r\n" + chunked(BODY),
    "folded": LINE + b"x: a\r\n content-length: 99\r\ncontent-length: 12\r\n\r\n" + BODY,
    "folded coding": LINE + b"transfer-encoding:\r\n chunked\r\ncontent-length: 12\r\n\r\n" + BODY,
    "other coding": LINE + b"transfer-encoding: xchunked\r\n\r\n" + chunked(BODY),
    "chunked not last": LINE + b"transfer-encoding: chunked, identity\r\n\r\n" + chunked(BODY),
    "nul in a value": LINE + b"x: a\0b\r\ncontent-length: 12\r\n\r\n" + BODY,
    "nul in a name": LINE + b"x\0y: a\r\ncontent-length: 12\r\n\r\n" + BODY,
    "bare cr": LINE + b"x: a\rcontent-length: 99\r\ncontent-length: 12\r\n\r\n" + BODY,
    "no name": LINE + b": a\r\ncontent-length: 12\r\n\r\n" + BODY,
    "chunk no hex": LINE + CHUNKS + b"\r\nzz\r\n" + BODY,
    "chunk signed": LINE + CHUNKS + b"\r\n-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk beyond 64 bit": LINE + CHUNKS + b"\r\n1000000000000000c\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk 0x": LINE + CHUNKS + b"\r\n0xc\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than said": LINE + CHUNKS + b"\r\n4\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk ends in lf": LINE + CHUNKS + b"\r\nc\n" + BODY + b"\n0\n\n",
    "two protocols": b"POST /generate HTTP/1.1 HTTP/1.0\r\nhost: x\r\n\r\n",
    "blanks in the path": b"POST /generate x HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n"
    + BODY,
}


async def test_a_request_that_can_be_read_in_two_ways_is_refused_with_all_behind_it() -> None:
    async with gatehouse(ENGINES) as house:
        for name, raw in AMBIGUOUS.items():
            found = await tell(house, raw + HIDDEN)
            assert found == b"" or found.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")), name
            assert found.count(b"HTTP/1.1 ") <= 1, f"{name}: the connection was read on"
            assert seen(house) == [], name
        await until(lambda: house.idle)


async def test_what_only_looks_odd_is_served_and_the_engine_gets_one_framing() -> None:
    """A length of ours, whatever the client's framing was; the next request is its own."""
    odd = {
        "chunks": LINE + CHUNKS + b"\r\n" + chunked(BODY),
        "extensions": LINE + CHUNKS + b"\r\nc;a=b\r\n" + BODY + b"\r\n0;x\r\nsum: 1\r\n\r\n",
        "capitals": LINE + b"Transfer-Encoding: Chunked\r\n\r\n" + chunked(BODY),
        "zeros": LINE + b"content-length: 0012\r\n\r\n" + BODY,
    }
    async with gatehouse(ENGINES) as house:
        for name, raw in odd.items():
            for engine in house.engines.values():
                engine.requests.clear()
            found = await tell(house, raw + HIDDEN)
            assert found.count(b"HTTP/1.1 200 ") == 2, (name, found[:300])
            for engine in house.engines.values():
                first, second = (r.partition(b"\r\n\r\n") for r in engine.requests)
                for head, _, body in (first, second):
                    assert head.lower().count(b"content-length") == 1
                    assert b"transfer-encoding" not in head.lower()
                    assert f"content-length: {len(body)}".encode() in head.lower()
                assert json.loads(first[2])["text"] == "x"
                assert json.loads(second[2])["text"] == "hidden"


STRANGE = [
    "/generate/../flush_cache", "/v1/../flush_cache", "/generate/..%2fflush_cache",
    "//generate", "/generate/", "/generate%00", "/generate%0d%0ax:%20y",
    "/generate;/../flush_cache",
    "/v1/chat/completions/../../flush_cache", "/GENERATE", "/generate%2f..%2fabort_request",
    "/%2e%2e/generate", "http://127.0.0.1:1/generate/../flush_cache",
]  # fmt: skip


async def post(house: Gatehouse, target: str) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nhost: evil\r\ncontent-length: {len(BODY)}\r\n"
    return await tell(house, head.encode() + LAST + b"\r\n" + BODY)


async def test_a_path_that_is_none_of_ours_reaches_no_engine() -> None:
    async with gatehouse(ENGINES) as house:
        for target in STRANGE:
            found = await post(house, target)
            statuses = (b"HTTP/1.1 404 ", b"HTTP/1.1 400 ", b"HTTP/1.1 405 ")
            assert found.startswith(statuses), (target, found[:200])
            assert seen(house) == [], target


async def test_another_spelling_of_ours_reaches_engines_as_ours() -> None:
    async with gatehouse(ENGINES) as house:
        for target in ("/%67enerate", "/generate?x=/flush_cache", "http://evil.example/generate"):
            found = await post(house, target)
            assert found.startswith(b"HTTP/1.1 200 "), (target, found[:200])
        for engine in house.engines.values():
            assert len(engine.requests) == 3
            for request in engine.requests:
                assert request.startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
                assert b"evil" not in request


async def test_a_half_request_leaves_nothing_behind() -> None:
    whole = LINE + CHUNKS + b"\r\n" + chunked(BODY)
    async with gatehouse(ENGINES) as house:
        for cut in range(1, len(whole), 3):
            host, _, port = house.url[7:].rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(whole[:cut])
            writer.close()
        await until(lambda: house.idle)
        assert seen(house) == []

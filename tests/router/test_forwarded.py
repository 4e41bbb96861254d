"""Headers: engines get what is theirs, on both legs the same, and nothing else; FR-AP-07."""

from __future__ import annotations

import asyncio

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import answer, replies

from kvplane.router.keys import digest_of
from kvplane.router.settings import AdmissionSettings, KeySettings, RouterSettings

GOOD = replies(answer(b"{}"))
PASSED = {
    b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"tracestate": b"a=1",
    b"x-request-id": b"req-1",
    b"x-correlation-id": b"c-1",
}
HELD = {
    b"connection": b"x-foo, keep-alive",
    b"x-foo": b"1",
    b"te": b"trailers",
    b"trailer": b"x-foo",
    b"proxy-authorization": b"Basic x",
    b"proxy-connection": b"keep-alive",
    b"keep-alive": b"timeout=5",
    b"upgrade": b"h2c",
    b"cookie": b"a=b",
    b"x-override-bootstrap-room": b"1",
    b"x-data-parallel-rank": b"7",
    b"x-kvplane-decode": b"9.9.9.9",
    b"forwarded": b"for=9.9.9.9",
    b"x-api-key": b"sk-client",
}


async def send(house: Gatehouse, path: str, headers: dict[bytes, bytes]) -> bytes:
    """The head of an answer to one request with exactly these headers."""
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: gateway.example", b"content-length: 12"]
    lines += [b"%s: %s" % pair for pair in headers.items()]
    writer.write(b"\r\n".join(lines) + b'\r\n\r\n{"text":"x"}')
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return head


def seen(house: Gatehouse, engine: str) -> dict[bytes, bytes]:
    """Headers of the last request at an engine; each name once."""
    head = house.engines[engine].requests[-1].partition(b"\r\n\r\n")[0]
    pairs = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
    names = [name.lower() for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return {name.lower(): value for name, value in pairs}


@pytest.mark.parametrize("path", ["/generate", "/v1/embeddings"])
async def test_engines_get_what_is_theirs_and_both_legs_the_same(path: str) -> None:
    async with gatehouse({"p1": GOOD, "d1": GOOD}) as house:
        key = {b"authorization": b"Bearer of-the-engine"}
        head = await send(house, path, PASSED | HELD | key)
        assert b" 200 " in head and b"x-request-id: req-1" in head
        at_prefill = seen(house, "p1")
        for name, value in (PASSED | key).items():
            assert at_prefill[name] == value
        assert at_prefill[b"host"] == house.engines["p1"].url.removeprefix("http://").encode()
        assert not HELD.keys() & at_prefill.keys()
        assert b"gateway.example" not in b"".join(at_prefill.values())
        if path == "/generate":
            same = {b"host", b"content-length"}
            at_decode = seen(house, "d1")
            left = [
                {k: v for k, v in one.items() if k not in same} for one in (at_prefill, at_decode)
            ]
            assert left[0] == left[1]


@pytest.mark.parametrize("path", ["/generate", "/v1/embeddings"])
async def test_what_a_clients_connection_names_is_not_sent_on(path: str) -> None:
    async with gatehouse({"p1": GOOD, "d1": GOOD}) as house:
        head = await send(house, path, PASSED | {b"connection": b"close, TraceState"})
        assert b" 200 " in head
        for engine in ("p1", "d1")[: 2 if path == "/generate" else 1]:
            found = seen(house, engine)
            assert b"tracestate" not in found and b"traceparent" in found


@pytest.mark.parametrize(
    ("admission", "sent", "upstream"),
    [
        (AdmissionSettings(), b"Bearer of-the-engine", b"Bearer of-the-engine"),
        (AdmissionSettings(api_key="k-gate"), b"Bearer k-gate", b"Bearer k-gate"),
        (
            AdmissionSettings(api_key="k-gate", keys=(KeySettings("a", digest_of("k-a")),)),
            b"Bearer k-a",
            b"Bearer k-gate",
        ),
        (AdmissionSettings(keys=(KeySettings("a", digest_of("k-a")),)), b"Bearer k-a", None),
    ],
    ids=["open", "one key", "a key of many", "a key of many, engines open"],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/embeddings"])
async def test_whose_key_an_engine_gets(
    path: str, admission: AdmissionSettings, sent: bytes, upstream: bytes | None
) -> None:
    async with gatehouse({"p1": GOOD, "d1": GOOD}, RouterSettings(admission=admission)) as house:
        head = await send(house, path, {b"authorization": sent, b"x-api-key": sent[7:]})
        assert b" 200 " in head
        for engine in ("p1", "d1")[: 2 if path == "/generate" else 1]:
            found = seen(house, engine)
            assert found.get(b"authorization") == upstream
            assert b"x-api-key" not in found


async def test_questions_to_engines_bring_the_key_too() -> None:
    """An engine behind a key answers /v1/models with it only."""
    settings = RouterSettings(admission=AdmissionSettings(api_key="k-gate"))
    async with gatehouse({"p1": GOOD, "d1": GOOD}, settings) as house:
        await house.get("/v1/models")
        assert seen(house, "p1")[b"authorization"] == b"Bearer k-gate"

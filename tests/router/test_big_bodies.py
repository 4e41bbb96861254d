"""Big and slow bodies: up to the limit they pass, above it 413, and nobody else waits; FR-AP-06."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import answer, replies
from kit.wait import until

from kvplane.router.settings import AdmissionSettings, RetrySettings, RouterSettings

MB = 1_000_000
LIMIT = 64 * MB
GOOD = replies(answer(b"{}"))
ENGINES = {"p1": GOOD, "d1": GOOD}


def settings(**limits: float) -> RouterSettings:
    admission = AdmissionSettings(**({"most_body_bytes": LIMIT} | limits))  # type: ignore[arg-type]
    return RouterSettings(retry=RetrySettings(retries=0), admission=admission)


def body(size: int) -> bytes:
    """A request of so many bytes, most of them a member nobody here knows."""
    head, tail = b'{"text":"x","picture":"', b'"}'
    return head + b"a" * (size - len(head) - len(tail)) + tail


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """Without a length."""
    for at in range(0, len(data), MB):
        yield data[at : at + MB]


async def open_to(house: Gatehouse) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = house.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    ("size", "chunked"),
    [(900_000, False), (1_100_000, True), (2_100_000, False), (16 * MB, True), (20 * MB, False)],
)
async def test_up_to_the_limit_both_engines_get_every_byte(size: int, chunked: bool) -> None:
    sent = body(size)
    async with gatehouse(ENGINES, settings()) as house:
        data = pieces(sent) if chunked else BytesIO(sent)
        async with house.session.post(house.url + "/generate", data=data) as got:
            assert got.status == 200, await got.text()
        for engine in house.engines.values():
            (request,) = engine.requests
            assert request.partition(b"\r\n\r\n")[2].startswith(sent[:-1])
        await until(lambda: house.count("admission_body_bytes") == 0)


@pytest.mark.parametrize("chunked", [False, True])
async def test_above_the_limit_it_is_413_whether_a_length_was_told_or_not(chunked: bool) -> None:
    """200 MB against 64; the client sends on while it is answered, and hears it."""
    async with gatehouse(ENGINES, settings()) as house:
        reader, writer = await open_to(house)
        length = b"transfer-encoding: chunked" if chunked else b"content-length: 200000000"
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n")
        part = b"f4240\r\n" + b"a" * MB + b"\r\n" if chunked else b"a" * MB
        answered = asyncio.create_task(reader.read())
        for _ in range(200):
            if answered.done():
                break
            writer.write(part)
            await writer.drain()
        head, _, told = (await answered).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"413" and b"connection: close" in head
        assert json.loads(told)["error"]["code"] == "payload_too_large"
        writer.close()
        assert house.engines["p1"].requests == []
        await until(lambda: house.count("admission_body_bytes") == 0)


async def test_bodies_of_all_requests_together_are_bounded() -> None:
    limits = settings(most_body_bytes=3 * MB, most_held_bytes=5 * MB)
    async with gatehouse(ENGINES, limits) as house:
        reader, writer = await open_to(house)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2900000\r\n\r\n")
        writer.write(body(2_900_000)[:-1])  # all but its end
        await until(lambda: house.count("admission_body_bytes") == 2_899_999)
        status, raw, headers = await house.post("/generate", body(2_900_000))
        assert (status, json.loads(raw)["error"]["code"]) == (503, "overloaded")
        assert headers["retry-after"] == "1"
        assert (await house.post("/generate", body(MB)))[0] == 200
        writer.write(b"}")
        assert b" 200 " in await reader.readline()
        writer.close()
        await until(lambda: house.count("admission_body_bytes") == 0)


@pytest.mark.parametrize(
    "limits",
    [{"body_idle_s": 0.2}, {"body_s": 0.2, "body_pace": 10 * MB}],
    ids=["silence", "the whole"],
)
async def test_a_slow_upload_has_a_deadline_and_holds_nobody_up(limits: dict[str, float]) -> None:
    async with gatehouse(ENGINES, settings(**limits)) as house:
        reader, writer = await open_to(house)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{")
        for _ in range(5):
            assert (await house.post("/generate", {"text": "x"}))[0] == 200
        head, _, told = (await reader.read()).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"408" and b"connection: close" in head
        assert json.loads(told)["error"]["message"].startswith("1 bytes of the body came")
        writer.close()
        assert house.count("requests_total", route="/generate", status="408") == 1


async def test_a_long_body_that_keeps_coming_is_not_late() -> None:
    """Each byte that came buys time: what would be late by itself is not."""
    async with gatehouse(ENGINES, settings(body_s=0.05, body_pace=1000)) as house:
        reader, writer = await open_to(house)
        sent = body(20_000)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20000\r\n\r\n")
        writer.write(sent[:19_000])
        await until(lambda: house.count("admission_body_bytes") == 19_000)
        begun = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > begun + 0.2)
        writer.write(sent[19_000:])
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_an_admin_body_is_bounded_too() -> None:
    async with gatehouse({}, settings()) as house:
        sent = b'{"url":"' + b"a" * 2 * MB + b'"}'
        kind = {"content-type": "application/json"}
        status, raw, _ = await house.post("/workers", sent, kind)
        assert (status, json.loads(raw)["error"]["code"]) == (413, "payload_too_large")

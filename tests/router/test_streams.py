"""Streams through the whole gateway: bytes as sent, at once, and an honest end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from kit.asking import Asked, asked
from kit.gatehouse import gatehouse
from kit.peer import Call, Script, answer, replies
from kit.wait import until

from kvplane.connections import Connection
from kvplane.router.breaker import State
from kvplane.router.legs_settings import LegSettings
from kvplane.router.settings import BreakerSettings, RetrySettings, RouterSettings

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PREFILLED = replies(answer(b'{"meta_info":{"cached_tokens":48}}'))
QUICK = RouterSettings(retry=RetrySettings(first_wait_s=0.01))
STREAM = {"text": "x", "stream": True}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def streams(*parts: bytes, end: bytes = b"0\r\n\r\n") -> Script:
    """Answers each request with these parts of a stream, then `end`."""

    async def script(call: Call) -> None:
        while await call.asked():
            await call.send(SSE + b"".join(map(chunk, parts)) + end)
            if not end:
                return

    return script


async def whole(url: str, body: dict[str, object], path: str = "/generate") -> tuple[bytes, Asked]:
    one = await asked(url, body, path)
    await one.head()
    data = await one.body()
    one.leave()
    return data, one


# -- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1_000_000, 5_000_000])
async def test_a_very_long_event_arrives_byte_exact(size: int) -> None:
    """FR-AP-01: there is no such thing as a line on the way."""
    line = b"data: " + random.Random(size).randbytes(size // 2).hex().encode() + b"\n\n"
    async with gatehouse({"p1": PREFILLED, "d1": streams(line, b"data: [DONE]\n\n")}) as house:
        data, _ = await whole(house.url, STREAM)
        assert data == line + b"data: [DONE]\n\n"
        await until(lambda: house.idle)


async def test_a_plain_answer_of_50_mb_arrives_byte_exact() -> None:
    """FR-AP-01."""
    body = random.Random(1).randbytes(1_000_000) * 50
    async with gatehouse({"p1": PREFILLED, "d1": replies(answer(body))}) as house:
        one = await asked(house.url, {"text": "x"}, limit=2**22)
        await one.head()
        at = 0
        while at < len(body):
            data = await one.reader.read(2**20)
            assert data and data == body[at : at + len(data)]
            at += len(data)
        one.leave()
        await until(lambda: house.idle)


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9}}\n\n'
DONE = b"data: [DONE]\n\n"
SHAPES = {
    "usage with empty choices": [b'data: {"choices":[{}]}\n\n', USAGE, DONE],
    "usage on the last content": [b'data: {"choices":[{}],"usage":{"prompt_tokens":9}}\n\n', DONE],
    "running usage": [b'data: {"choices":[{}],"usage":{"completion_tokens":%d}}\n\n' % n
                      for n in range(5)] + [DONE],
    "an empty chunk after usage": [USAGE, b'data: {"choices":[]}\n\n', DONE],
    "no end marker": [b'data: {"choices":[{}]}\n\n'],
    "blank lines and comments": [b": ping\n\n", b"\n\n", b"data: 1\n\n", DONE, b"\n\n", b": bye\n"],
    "carriage returns": [b"data: 1\r\n\r\n", b"data: [DONE]\r\n\r\n"],
    "events cut in the middle": [b"da", b"ta: 1", b"\n", b"\ndata: [DO", b"NE]\n\n"],
    "not ended by a blank line": [b"data: 1\n\n", b"data: [DONE]"],
    "no text": [bytes(range(256)), DONE],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_clean_stream_leaves_as_the_engine_sent_it(path: str) -> None:
    """FR-AP-02, FR-AP-12; the rule: what ends cleanly is passed as it is, nothing is added."""
    asks = {"stream": True, "text": "x"}
    if path != "/generate":
        asks = {"stream": True, "messages": [{"role": "user", "content": "x"}]}
    now: list[bytes] = []

    async def decode(call: Call) -> None:
        while await call.request():
            await call.send(SSE + b"".join(map(chunk, now)) + b"0\r\n\r\n")

    async with gatehouse({"p1": PREFILLED, "d1": decode}) as house:
        for name, parts in SHAPES.items():
            now[:] = parts
            data, one = await whole(house.url, asks, path)
            assert data == b"".join(parts), name
            assert one.headers["content-type"] == "text/event-stream"
            assert one.headers["x-accel-buffering"] == "no"


def cached(count: int) -> bytes:
    used = {"prompt_tokens": 99, "prompt_tokens_details": {"cached_tokens": count}}
    return b"data: " + json.dumps({"choices": [{}], "usage": used}).encode() + b"\n\n"


ACCOUNTS = {
    "on the last content": [b'data: {"choices":[{}]}\n\n', cached(48), DONE],
    "on every chunk": [cached(0), cached(16), cached(48), DONE],
    "an empty chunk after": [cached(48), b'data: {"choices":[],"usage":null}\n\n', DONE],
    "cut in the middle": [cached(48)[:40], cached(48)[40:], DONE],
}


@pytest.mark.parametrize("parts", ACCOUNTS.values(), ids=ACCOUNTS.keys())
@pytest.mark.parametrize("who", ["a prefill", "a unified worker"])
async def test_the_account_is_the_engines_last_word(parts: list[bytes], who: str) -> None:
    """FR-AP-12."""
    scripts = {"u1": streams(*parts)}
    if who == "a prefill":
        scripts = {"p1": streams(*parts), "d1": streams(DONE)}
    async with gatehouse(scripts) as house:
        data, one = await whole(house.url, STREAM)
        assert data == (DONE if who == "a prefill" else b"".join(parts))
        await until(lambda: house.idle)
        _, told = await house.get(f"/requests/{one.headers['x-request-id']}")
        assert told["attempts"][0]["cached_tokens"]["actual"] == 48


# -- time ---------------------------------------------------------------------------------------


async def test_each_part_leaves_before_the_engine_makes_the_next() -> None:
    """FR-AP-04: the engine waits until the client has a token before it makes another."""
    taken, number = asyncio.Semaphore(0), 20

    async def decode(call: Call) -> None:
        await call.asked()
        await call.send(SSE)
        for count in range(number):
            await call.send(chunk(b"data: %d\n\n" % count))
            await taken.acquire()
        await call.send(b"0\r\n\r\n")

    async with gatehouse({"p1": PREFILLED, "d1": decode}) as house:
        one = await asked(house.url, STREAM)
        assert await one.head() == 200
        for count in range(number):
            assert await one.part() == b"data: %d\n\n" % count
            taken.release()
        assert await one.part() == b""
        one.leave()


# -- breaks -------------------------------------------------------------------------------------

THREE = [b"data: %d\n\n" % count for count in range(3)]


async def dies(call: Call) -> None:
    await call.asked()
    await call.send(SSE + b"".join(map(chunk, THREE)))


async def resets(call: Call) -> None:
    await call.asked()
    await call.send(SSE + b"".join(map(chunk, THREE)))
    await asyncio.sleep(0.05)  # a reset throws away what was not read
    call.reset()


async def stalls(call: Call) -> None:
    await call.asked()
    await call.send(SSE + b"".join(map(chunk, THREE)))
    await call.closed()


def garbles(framing: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.asked()
        await call.send(SSE + b"".join(map(chunk, THREE)))
        await call.send(framing)
        await call.closed()

    return script


BREAKS: dict[str, tuple[Script, str]] = {
    "dies": (dies, "decode_failed"),
    "resets": (resets, "decode_failed"),
    "stalls": (stalls, "deadline_exceeded"),
    "no hex": (garbles(b"zz\r\ndata: 4\n\n\r\n"), "decode_failed"),
    "longer than said": (garbles(b"2\r\n\n\nxx\r\n"), "decode_failed"),
    "another answer": (garbles(b"HTTP/1.1 200 OK\r\n\r\n"), "decode_failed"),
}


@pytest.mark.parametrize(("script", "code"), BREAKS.values(), ids=BREAKS.keys())
async def test_a_break_is_one_error_event_and_no_end_marker(script: Script, code: str) -> None:
    """FR-AP-03, FR-RT-19 (c): three tokens are out, so nobody is asked again."""
    limits = LegSettings(idle_s=0.5 if script is stalls else 20.0, sweep_s=0.05)
    scripts = {"p1": PREFILLED, "d1": script, "d2": script}
    settings = replace(QUICK, breaker=BreakerSettings(faults=1))
    async with gatehouse(scripts, settings, limits) as house:
        data, one = await whole(house.url, STREAM)
        events = [event for event in data.split(b"\n\n") if event.strip()]
        assert [event + b"\n\n" for event in events[:3]] == THREE
        (last,) = events[3:]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["stage"]) == (code, "end")
        assert error["room"] == one.headers["x-kvplane-room"]
        assert error["request_id"] == one.headers["x-request-id"]
        assert b"[DONE]" not in data
        assert sum(len(house.engines[name].requests) for name in ("d1", "d2")) == 1
        guilty = one.headers["x-kvplane-decode"]
        await until(lambda: house.idle)
        assert house.count("legs_total", side="decode", worker=guilty, outcome="fault") == 1
        assert house.count("legs_total", side="prefill", worker="p1", outcome="success") == 1
        assert house.count("retries_total", reason=code) == 0
        states = house.gateway.breakers.states(house.gateway.clock.now())
        opened = {str(worker) for worker, state in states.items() if state is State.OPEN}
        assert opened == {guilty}


LOGS = b'data: {"meta_info":{"output_token_logprobs":[]}}\n\n'
WHOLE: dict[str, tuple[dict[str, object], bytes]] = {
    "a stream": (STREAM, SSE + b"".join(map(chunk, [*THREE, DONE])) + b"0\r\n\r\n"),
    "merged": (STREAM | {"return_logprob": True}, SSE + chunk(LOGS) + chunk(DONE) + b"0\r\n\r\n"),
    "a plain answer": ({"text": "x"}, answer(b'{"text":"abc"}')),
}


@pytest.mark.parametrize(("body", "raw"), WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize("who", ["a decode", "a unified worker"])
async def test_an_answer_that_is_cut_at_any_byte_is_never_taken_for_a_whole_one(
    body: dict[str, object], raw: bytes, who: str
) -> None:
    """A part of it and an error event, or an error alone; the whole only of the last cut."""
    at = 0

    async def cut(call: Call) -> None:
        await call.asked()
        await call.send(raw[:at])

    once = replace(
        QUICK,
        retry=RetrySettings(retries=0),
        breaker=BreakerSettings(faults=10**6, pair_faults=10**6),
    )
    scripts = {"u1": cut} if who == "a unified worker" else {"p1": PREFILLED, "d1": cut}
    payload = b"".join(THREE) + DONE if "return_logprob" not in body else b""
    async with gatehouse(scripts, once) as house:
        for at in range(len(raw) + 1):
            data, one = await whole(house.url, body)
            if at == len(raw):
                assert one.status == 200 and b'"error"' not in data
            elif one.status == 200:
                begun, _, told = data.rpartition(b"\n\ndata: ")
                assert json.loads(told)["error"]["code"] == "decode_failed", (at, data)
                assert payload.startswith(begun) or not payload, (at, data)
            else:
                assert one.status == 502, (at, data)
                assert json.loads(data)["error"]["code"] == "decode_failed", (at, data)
        await until(lambda: house.idle)


async def test_a_stream_with_a_length_that_breaks_still_ends_with_its_error() -> None:
    async def script(call: Call) -> None:
        await call.asked()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n"
        await call.send(head + THREE[0])

    async with gatehouse({"p1": PREFILLED, "d1": script}, QUICK) as house:
        data, one = await whole(house.url, STREAM)
        assert "content-length" not in one.headers
        assert data.startswith(THREE[0]) and b"decode_failed" in data


def once(first: Callable[[Call], object]) -> Script:
    """The first request of this engine ends as told, all others well."""
    seen = [0]

    async def script(call: Call) -> None:
        while await call.asked():
            seen[0] += 1
            if seen[0] == 1:
                await first(call)  # type: ignore[misc]
                return
            await call.send(SSE + chunk(b"data: good\n\n") + b"0\r\n\r\n")

    return script


async def _before_headers(call: Call) -> None:
    call.reset()


async def _after_headers(call: Call) -> None:
    await call.send(SSE)


@pytest.mark.parametrize("first", [_before_headers, _after_headers])
async def test_while_no_byte_was_sent_another_attempt_is_invisible(
    first: Callable[[Call], object],
) -> None:
    """FR-RT-19 (a) and (b); the rule: a stream's head leaves with its first byte, so that a break
    before it is tried again like one before the head."""
    async with gatehouse({"p1": PREFILLED, "d1": once(first)}, QUICK) as house:
        data, one = await whole(house.url, STREAM)
        assert (one.status, data) == (200, b"data: good\n\n")
        rooms = [
            json.loads(request.partition(b"\r\n\r\n")[2])["bootstrap_room"]
            for request in house.engines["d1"].requests
        ]
        assert len(set(rooms)) == 2 and one.headers["x-kvplane-room"] == str(rooms[1])
        await until(lambda: house.idle)


async def test_idle_connections_that_the_engines_close_are_no_error_anybody_sees() -> None:
    """FR-RT-26: both engines close after 0.2 s and do not say so; requests about that far apart."""

    async def script(call: Call) -> None:
        while True:
            try:
                request = await asyncio.wait_for(call.asked(), 0.2)
            except TimeoutError:
                return
            if not request:
                return
            await call.send(answer(b"{}"))

    async with gatehouse({"p1": script, "d1": script}, QUICK) as house:

        async def client(number: int) -> set[int]:
            seen = set()
            for turn in range(6):
                seen.add((await house.post("/generate", {"text": "x"}))[0])
                await asyncio.sleep(0.19 + 0.002 * ((number + turn) % 11))
            return seen

        found = await asyncio.gather(*(client(number) for number in range(10)))
        assert set().union(*found) == {200}
        await until(lambda: house.idle)
        for name in ("p1", "d1"):
            rooms = [
                json.loads(request.partition(b"\r\n\r\n")[2])["bootstrap_room"]
                for request in house.engines[name].requests
            ]
            assert len(set(rooms)) == len(rooms), "a room was sent twice"
        assert house.count("legs_total", side="decode", worker="d1", outcome="fault") == 0


# -- slow readers -------------------------------------------------------------------------------


def floods(sent: list[int], most: int = 40_000_000) -> Script:
    """40 MB as fast as they are taken; the kernel's buffers alone take a quarter."""

    async def script(call: Call) -> None:
        await call.asked()
        await call.send(SSE)
        closed = asyncio.create_task(call.closed())
        at = len(sent)
        sent.append(0)
        while sent[at] < most and not closed.done():
            await call.send(chunk(b"x" * 65536))
            sent[at] += 65536
        await call.send(b"0\r\n\r\n")
        await closed

    return script


async def test_slow_readers_hold_up_their_engines_and_those_that_vanish_leave_nothing() -> None:
    """FR-AP-09."""
    sent: list[int] = []
    async with gatehouse({"p1": PREFILLED, "d1": floods(sent)}, QUICK) as house:
        clients = [await asked(house.url, STREAM, limit=4096) for _ in range(20)]
        for one in clients:
            assert await one.head() == 200
        before = -1
        while before != sum(sent):  # until every buffer on the way is full
            before = sum(sent)
            await asyncio.sleep(0.2)
        legs = list(house.legs._live)
        held = sum(leg.buffered_bytes for leg in legs)
        assert held < len(clients) * 1024 * 1024
        assert max(sent) < 25_000_000, "an engine was read to its end for nobody"
        for one in clients[::2]:
            one.leave()
        await until(lambda: len(house.legs._live) == 10, what="those that left to be let go")
        taker = clients[1]
        while len(await taker.part()) > 0:
            pass
        for one in clients:
            one.leave()
        await until(lambda: house.idle and house.engines["d1"].open <= 1)


async def test_a_client_that_takes_nothing_at_all_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FR-AP-09; the rule: not a byte taken for STALL_S ends the connection."""
    monkeypatch.setattr(Connection, "stall_s", 0.3)
    before, sent = Connection.stalled, list[int]()
    async with gatehouse({"p1": PREFILLED, "d1": floods(sent)}, QUICK) as house:
        one = await asked(house.url, STREAM, limit=4096)
        await until(lambda: Connection.stalled == before + 1)
        await until(lambda: house.idle and house.engines["d1"].open == 0)
        one.leave()

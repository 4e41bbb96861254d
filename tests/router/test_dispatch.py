"""Dispatch: two scripted engines, one client; what reaches whom when one of the three fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from kit.peer import Call, Peer, Script, answer, peer, replies
from kit.ports import free_port
from kit.wait import until

from kvplane.router.attempt import Attempt
from kvplane.router.blame import LegFailed, Side
from kvplane.router.dispatch import (
    BrokenBody,
    ClientGone,
    dispatch,
    finish_prefill,
    honest_end,
    pause,
)
from kvplane.router.legs import Legs
from kvplane.router.legs_errors import Cut, Phase
from kvplane.router.legs_exchange import Bell
from kvplane.router.legs_heads import read
from kvplane.router.legs_wire import Origin

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OWN = [(b"x-kvplane-room", b"7")]
PREFILLED = answer(json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}).encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Asker:
    """A client that keeps what it gets."""

    bell: Bell = field(default_factory=Bell)
    gone: bool = False
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    drains: bool = False  # takes parts at once
    taken: int = 0  # parts that were

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], data: bytes) -> bool:
        if not self.drains:
            return False
        assert not self.status and not self.ended
        self.status, self.headers, self.body, self.ended = status, dict(headers), data, True
        return True

    def put(self, data: bytes) -> bool:
        if not self.drains or self.gone:
            return False
        assert self.status and not self.ended
        self.body += data
        self.taken += 1
        return True

    def relay(self, chunks: bytes) -> bool:
        data = b""
        while chunks:
            size, _, rest = chunks.partition(b"\r\n")
            at = int(size, 16)
            assert at and rest[at : at + 2] == b"\r\n"
            data, chunks = data + rest[:at], rest[at + 2 :]
        return self.put(data)

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self.status
        self.status, self.headers = status, dict(headers)

    async def write(self, data: bytes, more: bool) -> None:
        assert self.status
        assert not self.ended
        self.body += data
        self.ended = not more

    def leave(self) -> None:
        self.gone = True
        self.bell.ring()


@dataclass
class Stage:
    legs: Legs
    prefill: Peer
    decode: Peer
    asker: Asker = field(default_factory=Asker)

    def begin(self) -> Attempt:
        bell = self.asker.bell
        prefill = self.legs.begin(Origin.parse(self.prefill.url), "/x", [], b"p", bell)
        decode = self.legs.begin(Origin.parse(self.decode.url), "/x", [], b"d", bell)
        attempt = Attempt(decode, "d1", prefill, "p1")
        prefill.bell = attempt  # as sending.py has it
        return attempt

    async def run(self) -> None:
        await dispatch(self.begin(), self.asker, OWN)

    async def failure(self) -> LegFailed:
        with pytest.raises(LegFailed) as caught:
            await self.run()
        return caught.value


@contextlib.asynccontextmanager
async def stage(prefill: Script, decode: Script) -> AsyncIterator[Stage]:
    legs = Legs()
    await legs.start()
    async with peer(prefill) as p, peer(decode) as d:
        yield Stage(legs, p, d)
        assert legs.live == 0
    await legs.stop()


async def hang(call: Call) -> None:
    """Takes the request and never answers."""
    await call.request()
    await call.closed()


def stream(*events: bytes, end: bool = True, reset: bool = False) -> Script:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(SSE)
        for event in events:
            await call.send(chunk(event))
            await asyncio.sleep(0.002)
        if end:
            await call.send(b"0\r\n\r\n")
            await call.closed()
        elif reset:
            call.reset()

    return script


async def test_a_plain_answer_of_decode_reaches_the_client_with_our_headers() -> None:
    async with stage(replies(PREFILLED), replies(answer(b'{"x": 1e2}'))) as s:
        attempt = s.begin()
        ended = []
        attempt.on_prefill_end = lambda: ended.append(True)
        await dispatch(attempt, s.asker, OWN)
        await finish_prefill(attempt, s.asker.bell, 5)
        assert (s.asker.status, s.asker.body, s.asker.ended) == (200, b'{"x": 1e2}', True)
        assert s.asker.headers[b"x-kvplane-room"] == b"7"
        assert s.asker.headers[b"content-length"] == b"10"
        assert attempt.usage.cached_tokens() == 48
        assert ended == [True]
        assert s.prefill.requests[0].endswith(b"p")
        assert s.decode.requests[0].endswith(b"d")


async def test_a_stream_passes_byte_exact_and_each_part_at_once() -> None:
    gates = [asyncio.Event() for _ in range(4)]
    parts = [b": c\n\n", b'data: {"a":1}\n\ndata: {"b"', b":2}\n\n", b"data: [DONE]\n\n"]

    async def decode(call: Call) -> None:
        await call.request()
        await call.send(SSE)
        for gate, part in zip(gates, parts, strict=True):
            await gate.wait()
            await call.send(chunk(part))
        await call.send(b"0\r\n\r\n")

    async with stage(replies(PREFILLED), decode) as s:
        task = asyncio.create_task(s.run())
        for number, gate in enumerate(gates):
            gate.set()
            want = b"".join(parts[: number + 1])
            await until(lambda want=want: s.asker.body == want, timeout_s=2)  # type: ignore[misc]
        await task
        assert s.asker.ended


async def test_parts_pass_at_once_and_in_order_where_the_client_drains() -> None:
    parts = [b"data: %d\n\n" % number for number in range(40)]
    async with stage(replies(PREFILLED), stream(*parts)) as s:
        s.asker.drains = True
        await s.run()
        assert s.asker.body == b"".join(parts)
        assert s.asker.ended and s.asker.taken > 20


@pytest.mark.parametrize("drains", [True, False])
async def test_a_plain_answer_that_is_whole_leaves_at_once_or_is_waited_for(drains: bool) -> None:
    async with stage(replies(PREFILLED), replies(answer(b'{"a":1}'))) as s:
        s.asker.drains = drains
        await s.run()
        assert (s.asker.status, s.asker.body, s.asker.ended) == (200, b'{"a":1}', True)
        assert s.asker.headers[b"content-length"] == b"7"
        assert s.asker.headers[OWN[0][0]] == OWN[0][1]


@pytest.mark.parametrize("news", ["prefill breaks", "prefill refuses", "the client left"])
async def test_no_part_passes_at_once_after_news_that_nobody_looked_at(news: str) -> None:
    """The news and a token of decode arrive in the same step of the loop."""
    async with stage(hang, hang) as s:
        s.asker.drains = True
        attempt = s.begin()
        task = asyncio.create_task(dispatch(attempt, s.asker, OWN))
        prefill, decode = attempt.prefill, attempt.decode
        assert prefill is not None
        await until(lambda: prefill.phase is decode.phase is Phase.SENT)
        decode.got_head(read(200, [(b"content-type", b"text/event-stream")], True, 4))
        decode.got_body(b"data: 1\n\n")
        await until(lambda: decode.relay is not None)
        decode.got_body(b"data: 2\n\n")
        assert s.asker.body == b"data: 1\n\ndata: 2\n\n"
        if news == "prefill breaks":
            prefill.fail(Cut, "broke off")
        elif news == "prefill refuses":
            prefill.got_head(read(500, [], True, 4))
        else:
            s.asker.leave()
        relay = decode.relay
        assert relay is None or not relay(chunk(b"data: 3\n\n"))
        decode.got_body(b"data: 3\n\n")
        prefill.fail(Cut, "broke off")
        with pytest.raises((LegFailed, ClientGone)):
            await task
        assert s.asker.body == b"data: 1\n\ndata: 2\n\n"
        assert decode.tap is decode.relay is None


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_a_4xx_of_prefill_reaches_the_client_as_it_is(status: int) -> None:
    body = b'{"object":"error","message":"no"}'
    async with stage(replies(answer(body, status, b"retry-after: 3\r\n")), hang) as s:
        failed = await s.failure()
        assert (failed.side, failed.status, failed.started) == (Side.PREFILL, status, False)
        assert failed.callers_mistake
        assert failed.cause.body() == body
        assert failed.cause.status == status
        assert failed.cause.retry_after == "3"
        assert s.asker.status == 0
        await until(lambda: s.decode.seen_closed == 1, timeout_s=1)


async def refused_by(call: Call) -> None:
    await call.request()
    call.reset()


FAILURES: dict[str, tuple[Script, int, str]] = {
    "500": (replies(answer(b'{"error":{"message":"boom"}}', 500)), 502, "answered 500: boom"),
    "503": (replies(answer(b"busy", 503)), 503, "answered 503: busy"),
    "reset": (refused_by, 502, "reset"),
    "garbage": (replies(b"nonsense\r\n\r\n"), 502, "not a valid answer"),
    "redirect": (replies(answer(b"", 302)), 502, "answered 302"),
}


@pytest.mark.parametrize(("script", "status", "text"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("side", list(Side))
async def test_the_first_failure_of_a_leg_ends_the_other_at_once(
    script: Script, status: int, text: str, side: Side
) -> None:
    scripts = (script, hang) if side is Side.PREFILL else (hang, script)
    async with stage(*scripts) as s:
        begun = time.monotonic()
        failed = await s.failure()
        assert time.monotonic() - begun < 3
        assert (failed.side, failed.started) == (side, False)
        assert failed.cause.code == f"{side}_failed"
        assert failed.cause.status == status
        assert text in failed.cause.message
        assert s.asker.status == 0
        other = s.decode if side is Side.PREFILL else s.prefill
        await until(lambda: other.seen_closed == 1, timeout_s=1)


@pytest.mark.parametrize("side", list(Side))
async def test_an_engine_that_is_down_is_a_503_with_the_phase(side: Side) -> None:
    async with stage(hang, hang) as s:
        down = s.prefill if side is Side.PREFILL else s.decode
        down.port = free_port()
        failed = await s.failure()
        assert (failed.side, failed.cause.status) == (side, 503)
        assert failed.leg is not None
        assert failed.leg.phase is Phase.CONNECT


async def test_the_stage_an_engine_names_makes_it_a_failed_transfer() -> None:
    body = b'{"error":{"message":"page 3 differs","stage":"verify"}}'
    async with stage(hang, replies(answer(body, 500))) as s:
        failed = await s.failure()
        assert (failed.cause.code, failed.cause.stage) == ("transfer_failed", "verify")


async def test_no_byte_of_decode_leaves_after_prefill_failed() -> None:
    """Decode's head and tokens are there, prefill's failure too: the client sees the failure."""
    async with stage(replies(answer(b"x", 500)), stream(b"data: 1\n\n", end=False)) as s:
        attempt = s.begin()
        prefill = attempt.prefill
        assert prefill is not None
        await until(lambda: prefill.complete and attempt.decode.buffered_bytes)
        with pytest.raises(LegFailed) as caught:
            await dispatch(attempt, s.asker, OWN)
        assert caught.value.side is Side.PREFILL
        assert s.asker.status == 0


async def test_prefill_failing_in_the_middle_of_the_stream_ends_it_honestly() -> None:
    gate = asyncio.Event()

    async def prefill(call: Call) -> None:
        await call.request()
        await gate.wait()
        await call.send(answer(b"{}", 500))

    async def decode(call: Call) -> None:
        await call.request()
        await call.send(SSE + chunk(b'data: {"a":1}\n\n'))
        await call.closed()

    async with stage(prefill, decode) as s:
        task = asyncio.create_task(s.failure())
        await until(lambda: s.asker.body)
        gate.set()
        failed = await task
        assert failed.started
        await honest_end(s.asker, failed, stream=True)
        events = [e for e in s.asker.body.split(b"\n\n") if e.strip()]
        assert events[0] == b'data: {"a":1}'
        error = json.loads(events[1].strip().removeprefix(b"data: "))["error"]
        assert error["code"] == "prefill_failed"
        assert s.asker.ended
        assert b"[DONE]" not in s.asker.body


@pytest.mark.parametrize("reset", [True, False])
async def test_decode_dying_in_the_stream_gives_its_tokens_then_an_error(reset: bool) -> None:
    events = [b"data: %d\n\n" % number for number in range(3)]
    async with stage(replies(PREFILLED), stream(*events, end=False, reset=reset)) as s:
        failed = await s.failure()
        assert (failed.side, failed.started) == (Side.DECODE, True)
        if not reset:
            assert s.asker.body == b"".join(events)
        assert not s.asker.ended


async def test_a_cut_plain_answer_becomes_an_error_while_it_is_small() -> None:
    async def cut(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async with stage(replies(PREFILLED), cut) as s:
        failed = await s.failure()
        assert (failed.side, failed.started) == (Side.DECODE, False)
        assert s.asker.status == 0


async def test_a_cut_plain_answer_that_began_to_leave_is_cut_for_the_client_too() -> None:
    async def cut(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 2_000_000)

    async with stage(replies(PREFILLED), cut) as s:
        failed = await s.failure()
        assert failed.started
        with pytest.raises(BrokenBody):
            await honest_end(s.asker, failed, stream=False)


async def test_a_large_plain_answer_arrives_byte_exact() -> None:
    body = bytes(range(256)) * 30_000
    async with stage(replies(PREFILLED), replies(answer(body))) as s:
        await s.run()
        assert s.asker.body == body
        assert s.asker.headers[b"content-length"] == b"%d" % len(body)


async def _leave_when(s: Stage, condition: Callable[[], object]) -> None:
    task = asyncio.create_task(s.run())
    await until(condition)
    s.asker.leave()
    with pytest.raises(ClientGone):
        await task
    await until(lambda: s.prefill.open == 0 and s.decode.open == 0, timeout_s=1)


async def test_a_client_that_leaves_before_the_answer_closes_both_engines() -> None:
    async with stage(hang, hang) as s:
        await _leave_when(s, lambda: s.prefill.requests and s.decode.requests)


async def test_a_client_that_leaves_in_the_stream_closes_both_engines() -> None:
    async def talk(call: Call) -> None:
        await call.request()
        await call.send(SSE + chunk(b"data: 1\n\n"))
        await call.closed()

    async with stage(hang, talk) as s:
        await _leave_when(s, lambda: s.asker.body)


async def test_a_cancelled_dispatch_closes_both_engines() -> None:
    async with stage(hang, hang) as s:
        task = asyncio.create_task(s.run())
        await until(lambda: s.prefill.requests and s.decode.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: s.prefill.open == 0 and s.decode.open == 0, timeout_s=1)


async def test_an_error_event_inside_prefills_200_is_a_failure() -> None:
    async with stage(stream(b'data: {"error":{"message":"aborted"}}\n\n'), hang) as s:
        failed = await s.failure()
        assert failed.side is Side.PREFILL
        assert "aborted" in failed.cause.message


async def test_an_error_body_that_never_ends_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvplane.router.dispatch.ERROR_BODY_S", 0.05)

    async def slow(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 500 No\r\ncontent-length: 50\r\n\r\nhalf")
        await call.closed()

    async with stage(slow, hang) as s:
        failed = await s.failure()
        assert failed.status == 500
        await until(lambda: s.prefill.open == 0 and s.decode.open == 0, timeout_s=1)


@pytest.mark.parametrize("side", list(Side))
async def test_the_other_leg_is_not_kept_until_the_failed_one_has_said_why(side: Side) -> None:
    gate = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 500 No\r\ncontent-length: 4\r\n\r\nbo")
        await gate.wait()
        await call.send(b"om")

    async with stage(*((slow, hang) if side is Side.PREFILL else (hang, slow))) as s:
        task = asyncio.create_task(s.failure())
        other = s.decode if side is Side.PREFILL else s.prefill
        await until(lambda: other.seen_closed == 1)
        assert not task.done()
        gate.set()
        assert "answered 500: boom" in (await task).cause.message


async def test_prefill_that_never_ends_is_closed_some_time_after_decode() -> None:
    async with stage(hang, replies(answer(b"{}"))) as s:
        attempt = s.begin()
        await dispatch(attempt, s.asker, OWN)
        await finish_prefill(attempt, s.asker.bell, 0.05)
        assert attempt.prefill is not None
        assert attempt.prefill.error is not None
        await until(lambda: s.prefill.seen_closed == 1, timeout_s=1)


async def test_one_leg_alone_serves_a_unified_worker() -> None:
    async with stage(hang, replies(answer(b"one"))) as s:
        decode = s.legs.begin(Origin.parse(s.decode.url), "/x", [], b"d", s.asker.bell)
        await dispatch(Attempt(decode, "u1"), s.asker, OWN)
        assert s.asker.body == b"one"
        assert s.prefill.requests == []


async def test_a_slow_client_slows_the_engine_down() -> None:
    sent = 0

    async def flood(call: Call) -> None:
        nonlocal sent
        await call.request()
        await call.send(SSE)
        closed = asyncio.create_task(call.closed())
        while not closed.done() and sent < 80_000_000:
            await call.send(chunk(b"x" * 65536))
            sent += 65536
        await closed

    async with stage(replies(PREFILLED), flood) as s:
        gate = asyncio.Event()

        async def slow(data: bytes, more: bool) -> None:
            await gate.wait()

        s.asker.write = slow  # type: ignore[method-assign]
        task = asyncio.create_task(s.run())
        before = -1
        while before != sent or not sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20_000_000
        gate.set()
        await until(lambda: sent > before + 10_000_000)
        s.asker.leave()
        with pytest.raises(ClientGone):
            await task
        await until(lambda: s.decode.open == 0, timeout_s=1)


async def test_a_pause_ends_in_time_or_when_the_client_leaves() -> None:
    asker = Asker()
    await pause(0.01, asker)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    waiting = asyncio.create_task(pause(60.0, asker))
    await asyncio.sleep(0)
    asker.bell.ring()  # something else moved: nobody has left
    await asyncio.sleep(0)
    assert not waiting.done()
    asker.leave()
    with pytest.raises(ClientGone):
        await waiting
    with pytest.raises(ClientGone):
        await pause(60.0, asker)
    assert loop.time() - begun < 30

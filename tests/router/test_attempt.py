"""Attempt: which leg is given up, who hears of it, and when decode begins."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from kit.peer import Call, Peer, Script, answer, peer, replies
from kit.ports import free_port
from kit.wait import until

from kvplane.router.attempt import Attempt, Refusal
from kvplane.router.blame import LegFailed, Side
from kvplane.router.legs import Legs
from kvplane.router.legs_errors import Cut, TimedOut
from kvplane.router.legs_exchange import Bell, Exchange
from kvplane.router.legs_heads import read
from kvplane.router.legs_settings import LegSettings
from kvplane.router.legs_wire import Origin


async def hang(call: Call) -> None:
    await call.request()
    await call.closed()


@dataclass
class Pair:
    legs: Legs
    prefill: Peer
    decode: Peer
    attempt: Attempt
    told: list[Side]

    def leg(self, there: Peer) -> Exchange:
        return self.legs.begin(Origin.parse(there.url), "/x", [], b"x", self.attempt.decode.bell)

    def unsent(self) -> Exchange:
        return Exchange(Origin.parse(self.decode.url), b"", b"", LegSettings(), Bell())


@contextlib.asynccontextmanager
async def pair(prefill: Script, decode: Script) -> AsyncIterator[Pair]:
    legs, bell, told = Legs(), Bell(), list[Side]()
    await legs.start()
    async with peer(prefill) as p, peer(decode) as d:
        both = [legs.begin(Origin.parse(one.url), "/x", [], b"x", bell) for one in (d, p)]
        attempt = Attempt(both[0], "d1", both[1], "p1", on_given_up=told.append)
        yield Pair(legs, p, d, attempt, told)
        attempt.abort()
        assert legs.live == 0
    await legs.stop()


async def test_both_engines_at_work_hear_of_it_once() -> None:
    async with pair(hang, hang) as both:
        await until(lambda: both.prefill.requests and both.decode.requests)
        for _ in range(3):
            both.attempt.abort()
        assert both.told == [Side.DECODE, Side.PREFILL]
        await until(lambda: both.prefill.seen_closed == both.decode.seen_closed == 1)


async def test_one_that_was_never_asked_hears_nothing() -> None:
    async with pair(hang, hang) as both:
        both.attempt.abort()  # nothing is connected yet
        assert both.told == []


async def test_one_that_answered_or_refused_has_nothing_to_end() -> None:
    async with pair(replies(answer(b"{}")), replies(answer(b"no", 503))) as both:
        prefill, decode = both.attempt.prefill, both.attempt.decode
        assert prefill is not None
        await until(lambda: prefill.complete and decode.status)
        both.attempt.abort()
        assert both.told == []


async def test_one_that_is_down_hears_nothing() -> None:
    async with pair(hang, hang) as both:
        both.decode.port = free_port()
        both.attempt.decode.abort()
        both.attempt.decode = down = both.leg(both.decode)
        await until(lambda: down.over)
        both.attempt.give_up(Side.DECODE)
        assert both.told == []


async def test_one_that_was_silent_too_long_is_still_at_work() -> None:
    async with pair(hang, hang) as both:
        await until(lambda: both.decode.requests)
        both.attempt.decode.fail(TimedOut, "no head")
        both.attempt.give_up(Side.DECODE)
        both.attempt.give_up(Side.DECODE)
        assert both.told == [Side.DECODE]


async def test_decode_is_begun_with_prefills_whole_answer_and_once() -> None:
    async with pair(replies(answer(b'{"a":1}')), hang) as both:
        attempt, begun = both.attempt, list[bytes]()
        attempt.decode.abort()
        attempt.decode, attempt.keeps = both.unsent(), True

        def follow(answer: bytes) -> Exchange:
            begun.append(answer)
            return both.leg(both.decode)

        attempt.follow = follow
        leg = attempt.prefill
        assert leg is not None
        await until(lambda: leg.complete)
        for _ in range(3):
            attempt.look_at_prefill()
        assert begun == [b'{"a":1}']
        await until(lambda: len(both.decode.requests) >= 1)


async def test_no_decode_is_begun_for_an_attempt_that_ended() -> None:
    async with pair(replies(answer(b'{"a":1}')), hang) as both:
        attempt = both.attempt
        attempt.decode.abort()
        attempt.decode, attempt.keeps = both.unsent(), True
        attempt.follow = lambda answer: pytest.fail("decode was begun")
        leg = attempt.prefill
        assert leg is not None
        await until(lambda: leg.complete)
        attempt.abort()
        attempt.look_at_prefill()
        assert attempt.answer == b'{"a":1}'  # what is to be cleaned up is known
        assert not attempt.taken


async def test_an_error_inside_a_200_begins_no_decode() -> None:
    async with pair(replies(answer(b'{"error":{"message":"boom"}}')), hang) as both:
        attempt = both.attempt
        attempt.keeps = True
        attempt.follow = lambda answer: pytest.fail("decode was begun")
        leg = attempt.prefill
        assert leg is not None
        await until(lambda: leg.complete)
        with pytest.raises(LegFailed, match="boom"):
            attempt.look_at_prefill()


@pytest.mark.parametrize(
    ("script", "taken"), [(replies(answer(b"{}")), True), (replies(answer(b"{}", 503)), False)]
)
async def test_a_decode_that_answered_well_has_taken_what_was_kept(
    script: Script, taken: bool
) -> None:
    async with pair(hang, script) as both:
        await until(lambda: both.attempt.decode.complete)
        assert both.attempt.taken is taken
        if not taken:
            with pytest.raises(Refusal):
                both.attempt.look_at_decode()


async def test_a_decode_that_died_has_taken_nothing_and_one_we_closed_lets_go() -> None:
    async def cut(call: Call) -> None:
        await call.request()
        call.reset()

    async with pair(hang, cut) as both:
        await until(lambda: both.attempt.decode.over)
        assert not both.attempt.taken
    async with pair(hang, hang) as both:
        await until(lambda: both.decode.requests)
        assert both.attempt.taken
        both.attempt.abort()
        assert both.attempt.taken


class Counting(Bell):
    rings = 0

    def ring(self) -> None:
        self.rings += 1
        super().ring()


def seated(**more: Any) -> tuple[Attempt, Exchange, Counting]:
    """An attempt that is its prefill's bell, as sending.py makes them."""
    bell, origin, limits = Counting(), Origin("h", 1), LegSettings()
    attempt = Attempt(Exchange(origin, b"", b"", limits, bell), "d1", None, "p1", **more)
    attempt.prefill = leg = Exchange(origin, b"", b"", limits, attempt)
    leg.calm = leg.slow = True
    return attempt, leg, bell


WHOLE = b'{"meta_info":{"cached_tokens":48}}'


def test_prefills_usual_end_is_booked_and_wakes_nobody() -> None:
    ended: list[bool] = []
    attempt, leg, bell = seated(on_prefill_end=lambda: ended.append(True))
    leg.got_whole(read(200, [], True, 4), b"34", WHOLE, 60)
    assert ended == [True] and attempt.prefill_ended and bell.rings == 0
    assert attempt.usage.cached_tokens() == 48
    attempt.look_at_prefill()
    assert ended == [True]


def test_whoever_waits_for_prefills_end_wakes() -> None:
    attempt, leg, bell = seated(awaited=True)
    leg.got_whole(read(200, [], True, 4), b"34", WHOLE, 60)
    assert attempt.prefill_ended and bell.rings == 1


@pytest.mark.parametrize(
    ("status", "body", "raised"),
    [(200, b'{"error":{"message":"gone"}}', LegFailed), (503, b"busy", Refusal)],
)
def test_prefills_bad_end_wakes_and_is_told_once(
    status: int, body: bytes, raised: type[Exception]
) -> None:
    ended: list[bool] = []
    attempt, leg, bell = seated(on_prefill_end=lambda: ended.append(True))
    leg.got_whole(read(status, [], True, 4), b"", body, 60)
    assert bell.rings == 1 and ended == []
    with pytest.raises(raised):
        attempt.look_at_prefill()
    assert len(ended) == (status == 200)


def test_a_prefill_that_broke_wakes() -> None:
    attempt, leg, bell = seated()
    leg.fail(Cut, "broke off")
    assert bell.rings == 1 and not attempt.prefill_ended


def test_what_decode_needs_of_prefills_answer_wakes_and_is_kept() -> None:
    attempt, leg, bell = seated(keeps=True)
    leg.got_whole(read(200, [], True, 4), b"34", WHOLE, 60)
    assert bell.rings == 1 and not attempt.prefill_ended
    attempt.look_at_prefill()
    assert attempt.prefill_ended and attempt.answer == WHOLE


def test_an_attempt_that_was_let_go_is_no_garbage() -> None:
    gc.disable()
    try:
        attempt, leg, bell = seated()
        last = weakref.ref(bell)  # the attempt holds its decode leg, and that one its bell
        leg.got_whole(read(200, [], True, 4), b"34", WHOLE, 60)
        attempt.let_go()
        del attempt, leg, bell
        assert last() is None
    finally:
        gc.enable()

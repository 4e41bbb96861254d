"""Looks: what is shown of choices that are alike is made once, and says what each would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from kvplane.router import facts
from kvplane.router.choice import Choice
from kvplane.router.depths import NOTHING
from kvplane.router.fleet import Fleet
from kvplane.router.foretold import Depth, Foretold
from kvplane.router.looks import MOST_KEPT, Looks, look
from kvplane.router.meeting import Meeting
from kvplane.router.request import parse
from kvplane.router.sending import bind
from kvplane.tallies import Counts
from kvplane.vocabulary import Epoch, Knowledge, Namespace, Pod, Role, Stage, Worker, WorkerUp

P1, D1 = Worker(Pod("p1")), Worker(Pod("d1"))
LEGS = Counts("legs_total", "Legs.", ("side", "worker", "outcome")).of
BODY = b'{"input_ids":[1,2,3]}'


def fleet(**more: Any) -> Fleet:
    made = Fleet()
    made.up(WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL, model="tiny", **more))
    made.up(WorkerUp(Pod("d1"), "http://d1:1", Role.DECODE, model="tiny", **more))
    return made


def choice(of: Fleet, **more: Any) -> Choice:
    prefill, decode = of.target(P1), of.target(D1)
    assert decode is not None
    given = {"depth": NOTHING, "knowledge": Knowledge.DARK, "reason": "no\ntokens"} | more
    policies = {"prefill_policy": "prefix", "decode_policy": "round_robin"}
    return Choice(prefill, decode, candidates=1, **policies, **given)


def met(of: Choice, **headers: str) -> Meeting:
    sent = tuple((name.encode(), value.encode()) for name, value in headers.items())
    ask = parse("/generate", BODY, "id", sent)
    return facts.meeting(ask, of, look(of, LEGS), bind(ask, of), 1, [Stage.PAIR, 2.0], 1000.0)


def test_a_choice_that_several_share_has_one_look_and_one_of_tokens_is_kept_by_nobody() -> None:
    looks, house = Looks(LEGS), fleet()
    shared, own = choice(house), choice(house, prompt_tokens=7)
    assert looks[shared] is looks[shared]
    assert looks[own] is not looks[own] and list(looks) == [shared]
    for _ in range(2 * MOST_KEPT):
        looks[choice(house)]
    assert len(looks) <= MOST_KEPT


@pytest.mark.parametrize("engine", ["kvplane", "sglang", "vllm"])
def test_headers_and_the_line_say_what_the_choice_does(engine: str) -> None:
    chosen = choice(
        fleet(engine=engine), depth=Depth(2, 6, 32, 31), prompt_tokens=100,
        knowledge=Knowledge.PARTIAL, prefill_epoch=Epoch(4),
    )  # fmt: skip
    ask = parse("/generate", BODY, "id")
    bindings = bind(ask, chosen)
    assert facts.headers(ask, look(chosen, LEGS), bindings) == [
        (b"x-request-id", b"id"),
        (b"x-kvplane-prefill", b"p1"),
        (b"x-kvplane-decode", b"d1"),
        (b"x-kvplane-depth", b"2/6"),
        (b"x-kvplane-knowledge", b"partial"),
        (b"x-kvplane-reason", b"no tokens"),
        (b"x-kvplane-room", str(bindings[0].room).encode()),
    ]
    shown = met(chosen, traceparent="00-x").shown()
    assert shown["traceparent"] == "00-x" and shown["opened_at"] == 1000.0
    assert shown["why"]["depth_tokens"] == 32 and shown["why"]["reason"] == "no\ntokens"
    assert shown["cached_tokens"] == {"predicted": 31, "actual": None}
    assert shown["prefill"]["epoch"] == 4 and shown["decode"]["url"] == "http://d1:1"
    tells = engine == "kvplane"
    assert (met(chosen).silent, len(met(chosen).sides)) == ((), 2) if tells else ((engine,), 0)
    assert (shown["triple"] is None) is (engine == "vllm")


def test_loads_are_those_of_the_moment_of_the_choice() -> None:
    house = fleet()
    chosen = choice(house)
    house.book(P1, 30)
    first = met(chosen)
    house.book(P1, 12)
    house.book(D1, 5)
    second = met(chosen)
    assert first.why is not second.why and first.why == second.why
    names = ("inflight_tokens", "inflight_requests")
    loads = [
        [one.shown()[side][name] for side in ("prefill", "decode") for name in names]
        for one in (first, second)
    ]
    assert loads == [[30, 1, 0, 0], [42, 2, 5, 1]]


def test_facts_that_change_are_not_those_of_who_was_chosen_before() -> None:
    house, looks = fleet(), Looks(LEGS)
    before = looks[choice(house)]
    house.up(WorkerUp(Pod("p1"), "http://elsewhere:1", Role.PREFILL, model="tiny"))
    after = looks[choice(house)]
    assert before.prefill is not None and after.prefill is not None
    assert (before.prefill.url, after.prefill.url) == ("http://p1:1", "http://elsewhere:1")


def reached(one: object) -> Iterator[object]:
    yield one
    inside: Iterable[object] = one if isinstance(one, (tuple, list)) else ()
    if isinstance(one, msgspec.Struct):
        inside = [getattr(one, name) for name in one.__struct_fields__]
    for it in inside:
        yield from reached(it)


def test_a_line_holds_no_prompt() -> None:
    tokens = tuple(range(1000, 1100))
    told = Foretold(P1, None, None, True, Namespace("tiny", 16), (tokens,), {})
    chosen = choice(fleet(), prompt_tokens=100, foretold=told)
    assert any(one is tokens for one in reached(chosen))
    assert not any(one is tokens or one is chosen for one in reached(met(chosen)))

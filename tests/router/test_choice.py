"""Choice: who serves, what it holds, and how far that is known."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from kit.clock import FakeClock
from prometheus_client import CollectorRegistry

from kvplane.index import Chains, View, chain
from kvplane.router import facts
from kvplane.router.availability import AllShut
from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.choice import Choice, Chooser
from kvplane.router.errors import GatewayError
from kvplane.router.evidence import Ledger
from kvplane.router.fleet import Fleet
from kvplane.router.gateway import Gateway
from kvplane.router.legs import Legs
from kvplane.router.looks import look
from kvplane.router.metrics import RouterMetrics
from kvplane.router.prompts import Prompt, Prompts
from kvplane.router.request import CHAT, parse
from kvplane.router.settings import BreakerSettings, RouterSettings
from kvplane.vocabulary import (
    Epoch,
    Knowledge,
    Known,
    Namespace,
    Pod,
    PrefixChain,
    Role,
    Stage,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

TOKENS = list(range(100))
BODY = "/generate", b'{"text":"x"}'
PLAIN = CHAT, b'{"messages":[{"role":"user","content":"x"}]}'
P1, P2, D1 = Worker(Pod("p1")), Worker(Pod("p2")), Worker(Pod("d1"))


class House:
    """A fleet, a view, and a chooser over them."""

    def __init__(self, **facts: Any) -> None:
        self.view, self.fleet = View(), Fleet()
        self.breakers = Breakers(BreakerSettings(faults=1))
        self.blind = ""
        self.doubts: dict[Worker, tuple[Knowledge, str]] = {}
        self.differences: tuple[str, ...] = ()
        for name in ("p1", "p2"):
            self.up(name, Role.PREFILL, **facts)
        self.up("d1", Role.DECODE)
        self.chooser = Chooser(
            self.view,
            self.fleet,
            self.breakers,
            RouterSettings(),
            lambda one, other: self.differences,
            lambda: 0.5,
            lambda: self.blind,
            self.doubts.get,
        )

    def up(self, name: str, role: Role, **facts: Any) -> None:
        known = {"model": "tiny", "block_size": 16, "events": ("tcp://x:1",)} | facts
        self.fleet.up(WorkerUp(pod=Pod(name), url=f"http://{name}:1", role=role, **known))

    def store(self, worker: Worker, blocks: int, size: int = 16, tokens: Any = TOKENS) -> None:
        hashes = chain(tokens, Namespace("tiny", size)).blocks[:blocks]
        self.view.apply(Stored(worker, Epoch(1), Tier.GPU, None, hashes, size))
        self.view.apply(Known(worker, Epoch(1), Knowledge.EXACT, "", 0.0))

    def choose(self, *prompts: list[int], **more: Any) -> Choice:
        ask = parse(*more.pop("body", BODY), "id")
        prompt = more.pop("prompt", None) or Prompt(tuple(prompts) or (TOKENS,))
        return self.chooser.choose(ask, prompt, more.pop("now", 0.0), **more)


def test_the_deepest_prefix_wins_and_its_depth_is_told() -> None:
    house = House()
    house.store(P1, 2)
    house.store(P2, 5)
    choice = house.choose()
    assert choice.holder.worker == P2
    assert (choice.depth.blocks, choice.depth.asked, choice.depth.tokens) == (5, 6, 80)
    assert choice.depth.predicted == 80
    assert (choice.knowledge, choice.reason) == (Knowledge.EXACT, "")


def test_a_choice_carries_the_lives_it_was_made_under() -> None:
    house = House()
    house.store(P1, 3)
    choice = house.choose()
    assert (choice.prefill_epoch, choice.decode_epoch) == (Epoch(1), None)  # d1: never heard of
    met = facts.meeting(
        parse("/generate", b'{"text":"x"}', "id"),
        choice,
        look(choice, RouterMetrics(CollectorRegistry()).legs.of),
        [],
        1,
        [Stage.PAIR, 0.0],
        0.0,
    ).shown()
    assert (met["prefill"]["epoch"], met["decode"]["epoch"]) == (1, None)


@pytest.mark.parametrize("body", [BODY, PLAIN])
def test_where_no_tokens_are_known_all_requests_of_a_pair_share_a_choice(body: Any) -> None:
    house = House()
    slow = {"prompt": Prompt(None, "slow"), "body": body, "now": 1000.0}  # nobody is new
    first = house.choose(**slow)
    assert house.choose(**slow) is first
    assert house.choose(prompt=Prompt(None, "busy"), body=body).reason != first.reason
    assert house.choose(**slow, without=[P1]).holder.worker == P2
    assert house.choose(**slow) is first
    house.store(P1, 3)  # another life as the view has it
    assert (first.prefill_epoch, house.choose(**slow).prefill_epoch) == (None, Epoch(1))
    house.differences = ("page size",)
    house.up("p1", Role.PREFILL, events=())
    with pytest.raises(GatewayError, match="page size"):
        house.choose(**slow)
    house.differences = ()
    house.up("p1", Role.PREFILL, events=())
    told = house.choose(**slow)
    assert (first.knowledge, told.knowledge) == (Knowledge.DARK, Knowledge.OFF)


def test_a_prompt_held_whole_is_predicted_without_its_last_block() -> None:
    house = House()
    tokens = TOKENS[:96]
    house.store(P1, 6, tokens=tokens)
    choice = house.choose(tokens)
    assert (choice.depth.tokens, choice.depth.predicted) == (96, 80)


def test_block_sizes_may_differ_between_workers() -> None:
    house = House(block_size=None)
    house.store(P1, 1, size=64)
    house.store(P2, 3, size=16)
    choice = house.choose()
    assert (choice.holder.worker, choice.depth.tokens, choice.depth.blocks) == (P1, 64, 1)


def test_block_sizes_that_become_known_count_from_the_next_request_on() -> None:
    house = House(block_size=None)
    assert house.choose().depth.asked == 0
    house.store(P1, 1, size=64)
    depth = house.choose().depth
    assert (depth.blocks, depth.asked) == (1, 1)
    house.fleet.down(Pod("p1"))
    assert house.choose().depth.asked == 0
    house.up("p2", Role.PREFILL)
    assert house.choose().depth.asked == 6


def test_prompts_that_are_kept_apart_are_asked_in_namespaces_of_their_own() -> None:
    house = House(adapters=("tuned",))
    house.up("d1", Role.DECODE, adapters=("tuned",))
    house.store(P1, 6)
    named = parse("/generate", b'{"text":"x","model":"tuned"}', "id")
    tuned = house.chooser.choose(named, Prompt((TOKENS,)), 0.0)
    salted = house.choose(prompt=Prompt((TOKENS,), salt="s", adapter="mine"))
    plain = house.choose()
    found = [(one.foretold.space, one.depth.blocks) for one in (tuned, salted, plain)]  # type: ignore[union-attr]
    assert found == [
        (Namespace("tiny", 16, "tuned"), 0),
        (Namespace("tiny", 16, "mine", "s"), 0),
        (Namespace("tiny", 16), 6),
    ]


def test_depths_of_a_list_of_prompts_add_up() -> None:
    house = House()
    house.store(P1, 6)
    house.store(P2, 2)
    choice = house.choose(TOKENS, TOKENS[:40], [7] * 33)
    assert choice.holder.worker == P1
    assert (choice.depth.blocks, choice.depth.asked) == (6 + 2, 6 + 2 + 2)
    assert choice.depth.predicted == 96 + 32


@pytest.mark.parametrize(
    ("state", "reason"), [(Knowledge.PARTIAL, "gap open"), (Knowledge.DARK, "silent")]
)
def test_what_ingest_wrote_is_passed_on(state: Knowledge, reason: str) -> None:
    house = House()
    house.store(P1, 6)
    house.view.apply(Known(P1, Epoch(1), state, reason, 0.0))
    choice = house.choose()
    assert (choice.knowledge, choice.reason) == (state, reason)
    assert choice.depth.blocks == 6


def test_the_gateways_own_checks_can_only_make_it_worse() -> None:
    house = House()
    house.store(P1, 6)
    house.blind = "the index is still being read"
    assert house.choose().knowledge is Knowledge.DARK
    assert house.choose().reason == "the index is still being read"
    house.blind = ""
    dark = house.choose(prompt=Prompt(None, "slow"))
    assert (dark.knowledge, dark.reason) == (Knowledge.DARK, "tokenising took too long")
    assert dark.depth.blocks == 0


def test_a_worker_that_drifts_is_partly_believed_and_its_depth_still_counts() -> None:
    house = House()
    house.store(P1, 2)
    house.store(P2, 5)
    house.doubts[P2] = (Knowledge.PARTIAL, "salt: ...")
    choice = house.choose()
    assert (choice.knowledge, choice.reason) == (Knowledge.PARTIAL, "salt: ...")
    assert (choice.holder.worker, choice.depth.blocks) == (P2, 5)
    assert choice.foretold is not None and choice.foretold.exact  # or it could never end


def test_a_worker_whose_stream_is_silent_is_chosen_by_load_alone() -> None:
    house = House()
    house.store(P1, 2)
    house.store(P2, 6)
    house.doubts[P2] = (Knowledge.DARK, "stream silent: ...")
    assert house.choose().holder.worker == P1
    house.fleet.book(P1, 1000)
    choice = house.choose()
    assert (choice.holder.worker, choice.knowledge) == (P2, Knowledge.DARK)
    assert (choice.depth.blocks, choice.depth.asked, choice.depth.predicted) == (0, 6, 0)
    assert choice.foretold is not None and not choice.foretold.exact
    house.doubts.clear()
    assert house.choose().depth.blocks == 6


@pytest.mark.parametrize("told", [Knowledge.EXACT, Knowledge.PARTIAL, Knowledge.DARK])
@pytest.mark.parametrize("doubt", [Knowledge.PARTIAL, Knowledge.DARK])
def test_the_worse_of_ingests_word_and_our_own_is_shown(told: Knowledge, doubt: Knowledge) -> None:
    house = House()
    house.store(P1, 6)
    house.view.apply(Known(P1, Epoch(1), told, "theirs", 0.0))
    house.doubts[P1] = (doubt, "ours")
    order = list(Knowledge)
    choice = house.choose(without=(P2,))
    assert choice.knowledge is max(told, doubt, key=order.index)
    assert choice.reason == ("theirs" if order.index(told) > order.index(doubt) else "ours")


def test_a_choice_keeps_what_was_foretold() -> None:
    house = House()
    house.store(P1, 6)
    house.store(P2, 2)
    house.view.note(P1, Epoch(1), 9, 0.0)
    told = house.choose().foretold
    assert told is not None
    assert (told.worker, told.epoch, told.last, told.exact) == (P1, Epoch(1), 9, True)
    assert (told.predicted, told.most, told.tokens) == (96, 96, 100)
    assert told.depths[P2].predicted == 32
    assert told.now(house.view) == {P1: 96, P2: 32}


@pytest.mark.parametrize(
    ("body", "prompt", "facts"),
    [
        ({"sampling_params": {"n": 2}}, Prompt((TOKENS,)), {}),
        ({}, Prompt((TOKENS,) * 65), {}),
        ({}, Prompt(None, "slow"), {}),
        ({}, Prompt((TOKENS,)), {"events": ()}),
    ],
)
def test_what_cannot_be_compared_is_not_kept(
    body: dict[str, Any], prompt: Prompt, facts: dict[str, Any]
) -> None:
    house = House(**facts)
    ask = parse("/generate", json.dumps({"text": "x", **body}).encode(), "id")
    assert house.chooser.choose(ask, prompt, 0.0).foretold is None


def test_no_events_are_off_and_an_unheard_worker_is_dark() -> None:
    assert House(events=()).choose().knowledge is Knowledge.OFF
    assert House().choose().knowledge is Knowledge.DARK


def test_a_worker_nobody_heard_of_holds_nothing_of_what_is_asked() -> None:
    depth = House().choose().depth
    assert (depth.blocks, depth.asked, depth.predicted) == (0, 6, 0)


def test_where_nobody_told_what_he_holds_no_block_is_named() -> None:
    house, named = House(), list[Namespace]()

    def names(tokens: Any, space: Namespace) -> PrefixChain:
        named.append(space)
        return chain(tokens, space)

    house.chooser = Chooser(
        house.view, house.fleet, house.breakers, RouterSettings(), lambda one, other: (),
        lambda: 0.5, chain=names,
    )  # fmt: skip
    assert (house.choose().depth.asked, house.choose([*TOKENS, *TOKENS]).depth.asked) == (6, 12)
    assert not named
    house.store(P2, 3)
    assert (house.choose().depth.blocks, len(named)) == (3, 1)


def test_the_guilty_are_left_out_while_others_can_serve() -> None:
    house = House()
    house.store(P1, 6)
    assert house.choose(without=(P1,)).holder.worker == P2
    assert house.choose(without=(P1, P2)).holder.worker == P1
    assert house.choose(without=(D1,)).decode.worker == D1


def test_an_open_circuit_is_passed_by_and_where_all_are_the_first_is_tried_soon() -> None:
    house = House()
    for worker in (P1, P2):
        ticket = house.breakers.of(worker).admit(0.0)
        assert ticket is not None
        house.breakers.of(worker).book(ticket, Outcome.FAULT, 0.0)
        if worker == P1:
            assert house.choose().holder.worker == P2
    with pytest.raises(AllShut, match="no_prefill_available") as caught:
        house.choose()
    assert (caught.value.status, caught.value.retry_after, caught.value.alone) == (503, "1", False)
    assert house.choose(now=1.0).holder.worker in (P1, P2)


def test_one_that_is_new_is_not_flooded_though_nobody_knows_the_tokens() -> None:
    """40 requests at once; the same whether their tokens are known or guessed by their length."""
    for prompt in (Prompt(None, "slow"), Prompt((TOKENS,))):
        house = House()
        house.fleet.up(WorkerUp(Pod("p3"), "http://p3:1", Role.PREFILL, model="tiny"), 100.0)
        ask = parse("/generate", json.dumps({"text": "x" * 400}).encode(), "id")
        taken = Counter[str]()
        for _ in range(40):
            choice = house.chooser.choose(ask, prompt, 100.0)
            taken[choice.holder.name] += 1
            house.fleet.book(choice.holder.worker, facts.loads(ask, choice)[1])
        assert 1 <= taken["p3"] <= 4 and min(taken["p1"], taken["p2"]) >= 16, taken


def test_two_that_failed_together_too_often_meet_others_where_there_are_some() -> None:
    house = House()
    for _ in range(3):
        house.breakers.pairs.failed(P1, D1, 0.0)
    house.store(P1, 6)
    assert house.choose().holder.worker == P2
    house.fleet.down(Pod("p2"))
    assert house.choose().holder.worker == P1, "nobody else is left"


def test_a_worker_where_all_wait_is_passed_by_while_others_serve() -> None:
    house = House()
    house.store(P1, 6)
    for _ in range(3):
        house.fleet.book(P1, 0)
    assert house.choose(now=100.0).holder.worker == P1
    assert house.choose(now=129.0).holder.worker == P1
    assert house.choose(now=130.0).holder.worker == P2
    stuck = house.fleet.target(P1)
    assert stuck is not None
    house.fleet.answered(stuck, 131.0)
    assert house.choose(now=131.0).holder.worker == P1


@pytest.mark.parametrize(("without", "others"), [((), True), ((P1,), True), ((P1, P2), False)])
def test_whether_others_can_serve_is_known(without: tuple[Worker, ...], others: bool) -> None:
    assert House().chooser.others("tiny", without, 0.0) is others


def test_there_are_no_others_for_a_model_nobody_has() -> None:
    assert not House().chooser.others("huge", (), 0.0)


def test_a_pair_that_does_not_fit_is_named() -> None:
    house = House()
    house.differences = ("page_size: 16 against 64",)
    with pytest.raises(GatewayError, match="page_size: 16 against 64") as caught:
        house.choose()
    assert (caught.value.code, caught.value.status) == ("no_compatible_pair", 503)


def test_an_engine_without_a_hand_off_is_no_pair() -> None:
    house = House(engine="other")
    house.up("d1", Role.DECODE, engine="other")
    with pytest.raises(GatewayError, match="other"):
        house.choose()


def test_a_unified_worker_serves_where_there_is_no_pair() -> None:
    house = House()
    house.up("u1", Role.BOTH)
    assert house.choose().prefill is not None
    house.fleet.down(Pod("d1"))
    choice = house.choose()
    assert (choice.prefill, choice.decode.worker) == (None, Worker(Pod("u1")))
    house.fleet.down(Pod("u1"))
    with pytest.raises(GatewayError, match="no_decode_available"):
        house.choose()


async def test_of_a_prompt_that_is_new_everywhere_hardly_anything_is_hashed() -> None:
    house, clock, chains = House(), FakeClock(), Chains()
    house.store(P1, 6)
    parts = Prompts(), Legs(None, clock), Ledger(clock), RouterMetrics(CollectorRegistry())
    gateway = Gateway(house.view, house.fleet, *parts, clock=clock, chains=chains)
    ask = parse("/generate", json.dumps({"input_ids": [7] * 32_000}).encode(), "id")
    assert (await gateway.weigh(ask))[0].total == 32_000
    assert 0 < chains.blocks["hashed"] <= 128 < 32_000 // 16

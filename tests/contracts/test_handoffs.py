"""Every hand-off in the table: what the gateway may rely on, whatever the engine's family."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplane.router.errors import GatewayError
from kvplane.router.handoffs import HANDOFFS, Bodies, Handoff, Seats, reserved
from kvplane.router.request import Ask, parse
from kvplane.vocabulary import Binding, BootstrapTriple, Pod, Room, Worker

ASKS = {
    "chat": ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"x"}]}'),
    "chat of 3": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"x"}],"n":3,"seed":1E1}',
    ),
    "prompt": ("/v1/completions", b'{"prompt":"a", "unknown": [1.50], "stream":true}'),
    "one in a list": ("/v1/completions", b'{"prompt":["a"]}'),
    "two": ("/v1/completions", b'{"prompt":["a","b"]}'),
    "ids": ("/v1/completions", b'{"prompt":[1,2,3]}'),
    "id lists of two": ("/v1/completions", b'{"prompt":[[1,2],[3]],"n":2}'),
    "33": ("/generate", msgspec.json.encode({"text": ["t"] * 33})),
    "generate": ("/generate", b'{"input_ids":[[1],[2]],"sampling_params":{"n":2}}'),
    "stream": ("/v1/completions", b'{"prompt":"a","stream":true,"max_tokens":7,"z":0.10}'),
    "long": ("/v1/completions", msgspec.json.encode({"prompt": "a" * 100_000, "logit_bias": {}})),
}
HOSTILE = (
    b'"bootstrap_room":1,"bootstrap_host":"2.2.2.2","bootstrap_port":"x","routed_dp_rank":9,'
    b'"data_parallel_rank":9,"disagg_prefill_dp_rank":9,"decode_tp_size":9,"bootstrap_room":[1],'
    b'"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"2.2.2.2"},'
    b'"bootstrap_pair_key":"2.2.2.2","b\\u006fotstrap_room":1,"disagg_transfer_id":"2.2.2.2"'
)
FORMS = (b"1E1", b"1.50", b"0.10")  # numbers as the client wrote them


@pytest.fixture(params=HANDOFFS, ids=HANDOFFS)
def handoff(request: pytest.FixtureRequest) -> Handoff:
    return HANDOFFS[request.param]


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return [parse(path, raw, "id") for path, raw in ASKS.values()]


def bindings(count: int, prefill_rank: int = 0, decode_rank: int = 0) -> list[Binding]:
    prefill, decode = Worker(Pod("p"), prefill_rank), Worker(Pod("d"), decode_rank)
    rooms = [Room(2**63 - 200 + number) for number in range(count)]
    return [
        Binding(room, prefill, decode, BootstrapTriple("10.0.0.1", 8998, room)) for room in rooms
    ]


def written(handoff: Handoff, ask: Ask, seats: Seats | None = None) -> Bodies:
    seats = seats or Seats()
    ranks = (seats.prefill_dp - 1, seats.decode_rank)
    return handoff.write(ask, bindings(handoff.rooms(ask), *ranks), seats)


def decodes(bodies: Bodies) -> bytes:
    """Decode's body; where prefill must answer first, with a transfer object."""
    if bodies.decode is not None:
        return bodies.decode
    assert bodies.then is not None
    return bodies.then(b'{"kv_transfer_params":{"remote_host":"10.0.0.1"}}').body


def as_sent(sent: dict[str, Any], ask: Ask) -> bool:
    """Samples may have become prompts, or one for a prefill; n is gone then."""
    n = sent.get("n") or (sent.get("sampling_params") or {}).get("n")
    return ask.samples in (1, n)


def test_decode_gets_what_the_client_sent_as_it_was_sent(handoff: Handoff, asks: list[Ask]) -> None:
    for ask in asks:
        raw = decodes(written(handoff, ask))
        sent = msgspec.json.decode(raw)
        if not as_sent(sent, ask):
            continue
        ours = {name for name in sent if reserved(name) or name == "rid"}
        assert {name: value for name, value in sent.items() if name not in ours} == ask.body
        assert [form in raw for form in FORMS] == [form in ask.raw for form in FORMS]


def test_prefill_gets_the_same_prompt_and_unknown_members(
    handoff: Handoff, asks: list[Ask]
) -> None:
    for ask in asks:
        raw = written(handoff, ask).prefill
        if raw is not None:
            sent = msgspec.json.decode(raw)
            if not as_sent(sent, ask):
                continue
            limits = {"stream", "n", "max_tokens", "stream_options"}
            own = {name: value for name, value in ask.body.items() if name not in limits}
            assert {name: sent.get(name) for name in own} == own
            assert [form in raw for form in FORMS] == [form in ask.raw for form in FORMS]


def test_a_room_for_each_prompt_and_sample_or_one_or_none(
    handoff: Handoff, asks: list[Ask]
) -> None:
    for ask in asks:
        assert handoff.rooms(ask) in (0, 1, ask.prompts * ask.samples)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_what_names_rooms_ranks_and_hosts_is_never_the_clients(handoff: Handoff, path: str) -> None:
    """FR-RT-04: also twice, escaped, or of a wrong type."""
    own = {"/generate": b'"text":"a"', "/v1/completions": b'"prompt":"a"'}
    prompt = own.get(path, b'"messages":[{"role":"user","content":"a"}]')
    ask = parse(path, b"{%s,%s}" % (prompt, HOSTILE), "id")
    bodies = written(handoff, ask)
    for raw in (bodies.prefill, decodes(bodies)):
        if raw is not None:
            assert b"2.2.2.2" not in raw
            sent = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            assert bytes(sent.get("bootstrap_room", b"7")).isdigit()
            assert not {"routed_dp_rank", "data_parallel_rank", "decode_tp_size"} & set(sent)
            assert raw.count(b"bootstrap_room") == ("bootstrap_room" in sent)


def test_dp_ranks_are_pinned_where_a_pod_has_several(handoff: Handoff) -> None:
    ask = parse("/v1/completions", b'{"prompt":"a"}', "id")
    bodies = written(handoff, ask, Seats(prefill_dp=4, decode_dp=2, decode_rank=1))
    body = msgspec.json.decode(decodes(bodies))
    assert body.get("routed_dp_rank", None) == 1 or (
        bodies.decode_headers == ((b"x-data-parallel-rank", b"1"),)
    )
    if bodies.prefill is not None:
        body = msgspec.json.decode(bodies.prefill)
        assert body.get("routed_dp_rank", None) == 3 or (
            bodies.prefill_headers == ((b"x-data-parallel-rank", b"3"),)
        )


def test_no_rank_is_named_where_there_is_one(handoff: Handoff, asks: list[Ask]) -> None:
    for ask in asks:
        bodies = written(handoff, ask)
        for raw in (bodies.prefill, decodes(bodies)):
            assert raw is None or b"dp_rank" not in raw
        assert b"x-data-parallel-rank" not in dict(
            (*bodies.prefill_headers, *bodies.decode_headers)
        )


def test_it_says_the_same_each_time(handoff: Handoff, asks: list[Ask]) -> None:
    for ask in asks:
        one, other = written(handoff, ask), written(handoff, ask)
        assert (one.prefill, decodes(one), one.rids) == (other.prefill, decodes(other), other.rids)


def test_what_cannot_be_handed_over_has_a_short_reason(handoff: Handoff, asks: list[Ask]) -> None:
    for ask in asks:
        reasons = {"", "route", "list of prompts", "beam search", "log-probabilities of the prompt"}
        try:
            assert handoff.alone(ask) in reasons
        except GatewayError as error:
            assert (error.status, error.param) == (400, "n")

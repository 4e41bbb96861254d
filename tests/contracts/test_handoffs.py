"""Every hand-off in the table: what the gateway may rely on, whatever the engine's family."""

from __future__ import annotations

import msgspec
import pytest

from kvplane.router.handoffs import HANDOFFS, Handoff, reserved
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
    "hostile": (
        "/generate",
        b'{"text":"a","bootstrap_room":1,"bootstrap_host":"2.2.2.2","routed_dp_rank":9,"z":0.10}',
    ),
}


@pytest.fixture(params=HANDOFFS, ids=HANDOFFS)
def handoff(request: pytest.FixtureRequest) -> Handoff:
    return HANDOFFS[request.param]


@pytest.fixture(params=ASKS.values(), ids=ASKS.keys())
def ask(request: pytest.FixtureRequest) -> Ask:
    path, raw = request.param
    return parse(path, raw, "id")


def bindings(count: int, prefill_rank: int = 0, decode_rank: int = 0) -> list[Binding]:
    prefill, decode = Worker(Pod("p"), prefill_rank), Worker(Pod("d"), decode_rank)
    rooms = [Room(2**63 - 1 - number) for number in range(count)]
    return [
        Binding(room, prefill, decode, BootstrapTriple("10.0.0.1", 8998, room)) for room in rooms
    ]


def test_both_bodies_keep_what_the_client_sent(handoff: Handoff, ask: Ask) -> None:
    bodies = handoff.write(ask, bindings(handoff.rooms(ask)))
    own = {name: value for name, value in ask.body.items() if not reserved(name)}
    for raw in (bodies.prefill, bodies.decode):
        if raw is not None:
            sent = msgspec.json.decode(raw)
            if raw is bodies.prefill and ask.stream:
                assert sent.pop("stream_options", None) in (None, {"include_usage": True})
            assert {name: value for name, value in sent.items() if not reserved(name)} == own
            for form in (b"1E1", b"1.50", b"0.10"):
                assert (form in ask.raw) == (form in raw)


def test_a_room_for_each_prompt_and_sample_or_none_at_all(handoff: Handoff, ask: Ask) -> None:
    assert handoff.rooms(ask) in (0, ask.prompts * ask.samples)


def test_reserved_members_of_the_client_never_pass(handoff: Handoff) -> None:
    ask = parse(*ASKS["hostile"], "id")
    bodies = handoff.write(ask, bindings(handoff.rooms(ask)))
    for raw in (bodies.prefill, bodies.decode):
        assert raw is None or (b"2.2.2.2" not in raw and b'"bootstrap_room":1,' not in raw)
        assert raw is None or b"routed_dp_rank" not in raw


@pytest.mark.parametrize("family", ["sglang", "kvplane"])
def test_sglang_bodies_are_equal_and_name_the_rooms_of_each_item(family: str, ask: Ask) -> None:
    handoff = HANDOFFS[family]
    count = handoff.rooms(ask)
    bodies = handoff.write(ask, bindings(count))
    assert ask.stream or bodies.prefill == bodies.decode
    sent = msgspec.json.decode(bodies.decode)
    if ask.batched or count > 1:
        assert sent["bootstrap_host"] == ["10.0.0.1"] * count
        assert sent["bootstrap_port"] == [8998] * count
        assert len(set(sent["bootstrap_room"])) == count
        assert sent["bootstrap_room"][0] == 2**63 - 1
    else:
        assert sent["bootstrap_host"] == "10.0.0.1"
        assert sent["bootstrap_port"] == 8998
        assert sent["bootstrap_room"] == 2**63 - 1


def test_prefills_stream_tells_its_usage_and_decodes_is_as_the_client_asked() -> None:
    raw = b'{"prompt":"a","stream":true,"stream_options":{"include_usage":false}}'
    bodies = HANDOFFS["sglang"].write(parse("/v1/completions", raw, "id"), bindings(1))
    assert bodies.prefill is not None
    assert msgspec.json.decode(bodies.prefill)["stream_options"] == {"include_usage": True}
    assert msgspec.json.decode(bodies.decode)["stream_options"] == {"include_usage": False}
    native = HANDOFFS["sglang"].write(
        parse("/generate", b'{"text":"a","stream":true}', "id"), bindings(1)
    )
    assert native.prefill == native.decode


def test_dp_ranks_are_pinned_where_a_pod_has_several() -> None:
    ask = parse("/generate", b'{"text":"a"}', "id")
    bodies = HANDOFFS["sglang"].write(ask, bindings(1, 2, 1), prefill_dp=4, decode_dp=2)
    assert bodies.prefill is not None
    prefill, decode = msgspec.json.decode(bodies.prefill), msgspec.json.decode(bodies.decode)
    assert (prefill["routed_dp_rank"], prefill["disagg_prefill_dp_rank"]) == (2, 2)
    assert (decode["routed_dp_rank"], decode["disagg_prefill_dp_rank"]) == (1, 2)


def test_a_unified_worker_has_one_leg() -> None:
    ask = parse("/generate", b'{"text":"a"}', "id")
    assert HANDOFFS["none"].write(ask, []).prefill is None
    assert HANDOFFS["none"].write(ask, []).decode == ask.raw

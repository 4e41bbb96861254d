"""SGLang's hand-off: the triple in every form, names to abort, headers in place of members."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.router.errors import GatewayError
from kvplane.router.handoffs import HANDOFFS, Bodies, Seats
from kvplane.router.request import Ask, parse
from kvplane.vocabulary import Binding, BootstrapTriple, Pod, Room, Worker

FIRST = 0x47
FAMILIES = ["sglang", "sglang-lists", "kvplane"]


def written(way: str, path: str, body: dict[str, Any], seats: Seats | None = None) -> Bodies:
    ask: Ask = parse(path, json.dumps(body).encode(), "id")
    how, seats = HANDOFFS[way], seats or Seats()
    prefill, decode = Worker(Pod("p"), seats.prefill_dp - 1), Worker(Pod("d"), seats.decode_rank)
    rooms = [Room(FIRST + at) for at in range(how.rooms(ask))]
    found = [Binding(r, prefill, decode, BootstrapTriple("10.0.0.1", 8998, r)) for r in rooms]
    return how.write(ask, found, seats)


def sent(raw: bytes | None) -> dict[str, Any]:
    assert raw is not None
    found: dict[str, Any] = json.loads(raw)
    return found


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
LISTS: dict[str, tuple[str, dict[str, Any], int]] = {  # FR-RT-06, FR-RT-05
    "one text in a list": ("/v1/completions", {"prompt": ["a"]}, 1),
    "two texts": ("/v1/completions", {"prompt": ["a", "b"]}, 2),
    "lists of ids": ("/v1/completions", {"prompt": [[1, 2], [3]]}, 2),
    "33 texts": ("/v1/completions", {"prompt": ["a"] * 33}, 33),
    "generate texts": ("/generate", {"text": ["a", "b"]}, 2),
    "generate ids": ("/generate", {"input_ids": [[1], [2], [3]]}, 3),
    "n of a chat": ("/v1/chat/completions", CHAT | {"n": 3}, 3),
    "n of a completion": ("/v1/completions", {"prompt": "a", "n": 3}, 3),
    "n of each of two": ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}, 4),
}


@pytest.mark.parametrize(("path", "body", "count"), LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("way", FAMILIES)
def test_each_prompt_and_sample_has_its_room_in_lists_of_one_length(
    way: str, path: str, body: dict[str, Any], count: int
) -> None:
    found = written(way, path, body)
    if way == "sglang" and "n" in str(body.keys() | body.get("sampling_params", {})):
        body = {}  # below
    for raw in (found.prefill, found.decode):
        got = sent(raw)
        assert got["bootstrap_host"] == ["10.0.0.1"] * count
        assert got["bootstrap_port"] == [8998] * count
        assert got["bootstrap_room"] == list(range(FIRST, FIRST + count))
        assert {name: got[name] for name in body} == body


@pytest.mark.parametrize("way", FAMILIES)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/generate", {"input_ids": [1, 2]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_one_prompt_and_sample_has_plain_members(way: str, path: str, body: dict[str, Any]) -> None:
    found = written(way, path, body)
    assert found.prefill is found.decode
    got = sent(found.decode)
    assert (got["bootstrap_host"], got["bootstrap_port"]) == ("10.0.0.1", 8998)
    assert got["bootstrap_room"] == FIRST
    assert found.rids == (got["rid"],) == ("kvplane-0000000000000047",)


def test_names_of_ours_have_one_length_so_that_none_begins_with_another() -> None:
    one = written("sglang", "/generate", {"text": "a"}).rids[0]
    assert len(one) == len("kvplane-") + 16


@pytest.mark.parametrize(
    ("body", "rids"),
    [
        ({"text": "a", "rid": "mine"}, ("mine",)),
        ({"text": ["a", "b"], "rid": "mine"}, ("mine_0", "mine_1")),  # as SGLang numbers them
        ({"text": ["a", "b"], "rid": ["x", "y"]}, ("x", "y")),
        ({"text": ["a", "b"]}, ("kvplane-0000000000000047_0", "kvplane-0000000000000047_1")),
        ({"text": "a", "sampling_params": {"n": 2}, "rid": "mine"}, ("mine_0", "mine_1")),
        ({"text": "a", "rid": 7}, ()),  # the engine's to refuse
    ],
)
def test_a_name_the_client_gave_stays_and_is_what_is_aborted(
    body: dict[str, Any], rids: tuple[str, ...]
) -> None:
    found = written("sglang", "/generate", body)
    assert found.rids == rids
    assert "rid" not in body or sent(found.decode)["rid"] == body["rid"]


def test_samples_that_the_engine_names_anew_end_with_their_connection() -> None:
    body = {"text": "a", "sampling_params": {"n": 2}, "rid": "mine"}
    assert written("sglang-lists", "/generate", body).rids == ()


UNROLLED: list[tuple[str, str, str]] = [
    ("/v1/completions", '{"prompt":"a","n":3,"z":1.50}', '{"prompt":["a","a","a"],"z":1.50}'),
    ("/v1/completions", '{"n":2,"prompt":[1,2]}', '{"prompt":[[1,2],[1,2]]}'),
    ("/v1/completions", '{"prompt":["a","b"],"n":2}', '{"prompt":["a","a","b","b"]}'),
    (
        "/generate",
        '{"text":"a","sampling_params":{"n":2,"temperature":0.50}}',
        '{"text":["a","a"],"sampling_params":{"temperature":0.50}}',
    ),
    (
        "/generate",
        '{"input_ids":[[1],[2]],"sampling_params":[{"n":2,"k":1},{"n":2,"k":2}]}',
        '{"input_ids":[[1],[1],[2],[2]],"sampling_params":[{"k":1},{"k":1},{"k":2},{"k":2}]}',
    ),
]


@pytest.mark.parametrize(("path", "asked", "want"), UNROLLED)
def test_samples_are_a_list_of_equal_prompts_where_sglang_would_give_them_one_room(
    path: str, asked: str, want: str
) -> None:
    """FR-RT-05."""
    found = written("sglang", path, json.loads(asked))
    for raw in (found.prefill, found.decode):
        got = sent(raw)
        rooms = got.pop("bootstrap_room")
        assert len(set(rooms)) == len(rooms) == len(got.pop("bootstrap_host"))
        assert got.keys() - {"bootstrap_port", "rid"} == json.loads(want).keys()
        assert {name: got[name] for name in json.loads(want)} == json.loads(want)
    assert len(found.rids) == len(rooms)


def test_numbers_of_repeated_members_keep_their_bytes() -> None:
    raw = b'{"text":"a","sampling_params":{"n":2,"temperature":0.50},"stream":true}'
    ask = parse("/generate", raw, "id")
    pair = Worker(Pod("p")), Worker(Pod("d"))
    rooms = [
        Binding(Room(at), *pair, BootstrapTriple("10.0.0.1", 8998, Room(at))) for at in (71, 72)
    ]
    decode = HANDOFFS["sglang"].write(ask, rooms, Seats()).decode
    assert decode is not None
    assert b'"temperature":0.50' in decode


@pytest.mark.parametrize("way", ["sglang", "sglang-headers"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/generate", {"input_embeds": [[0.5]], "sampling_params": {"n": 2}}),
        ("/generate", {"text": "a", "image_data": ["x"], "sampling_params": {"n": 2}}),
        ("/generate", {"text": "a", "rid": ["x"], "sampling_params": {"n": 2}}),
        ("/v1/completions", {"prompt": "a" * 600_000, "n": 128}),
    ],
)
def test_samples_that_cannot_be_a_list_are_refused_with_the_reason(
    way: str, path: str, body: dict[str, Any]
) -> None:
    """FR-RT-05: never a hang."""
    ask = parse(path, json.dumps(body).encode(), "id")
    with pytest.raises(GatewayError, match="'n'") as caught:
        HANDOFFS[way].alone(ask)
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert HANDOFFS["sglang-lists"].alone(ask) == ""


def test_one_sample_is_always_fine() -> None:
    ask = parse("/v1/chat/completions", json.dumps(CHAT | {"n": 1}).encode(), "id")
    assert HANDOFFS["sglang"].alone(ask) == ""


def test_the_tiny_engine_has_one_name_for_a_list() -> None:
    found = written("kvplane", "/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}})
    assert found.rids == (sent(found.decode)["rid"],)


def test_prefills_stream_tells_its_usage_and_decodes_is_as_the_client_asked() -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": False}}
    found = written("sglang", "/v1/completions", body)
    assert sent(found.prefill)["stream_options"] == {"include_usage": True}
    assert sent(found.decode)["stream_options"] == {"include_usage": False}
    native = written("sglang", "/generate", {"text": "a", "stream": True})
    assert native.prefill == native.decode


def test_both_ranks_travel_to_both_so_that_a_room_need_not_name_one() -> None:
    seats = Seats(prefill_dp=4, decode_dp=2, decode_rank=1)
    found = written("sglang", "/generate", {"text": "a"}, seats)
    prefill, decode = sent(found.prefill), sent(found.decode)
    assert (prefill["routed_dp_rank"], prefill["disagg_prefill_dp_rank"]) == (3, 3)
    assert (decode["routed_dp_rank"], decode["disagg_prefill_dp_rank"]) == (1, 3)


def test_releases_that_take_no_lists_in_chat_count_on_from_one_room() -> None:
    """FR-RT-05, the kind that takes scalars only."""
    got = sent(written("sglang-counted", "/v1/chat/completions", CHAT | {"n": 3}).decode)
    assert (got["bootstrap_host"], got["bootstrap_room"]) == ("10.0.0.1", FIRST)
    many = sent(written("sglang-counted", "/v1/completions", {"prompt": ["a", "b"]}).decode)
    assert many["bootstrap_room"] == [FIRST, FIRST + 1]


def test_in_headers_the_body_stays_byte_by_byte() -> None:
    ask = parse("/generate", b'{"text" : "a","z":1.50 }', "id")
    pair = Worker(Pod("p"), 1), Worker(Pod("d"))
    room = Binding(Room(71), *pair, BootstrapTriple("fd00::1", 8998, Room(71)))
    found = HANDOFFS["sglang-headers"].write(ask, [room], Seats(prefill_dp=2))
    assert found.prefill == found.decode == ask.raw
    shared = {
        b"x-override-bootstrap-host": b"fd00::1",
        b"x-override-bootstrap-port": b"8998",
        b"x-override-bootstrap-room": b"71",
        b"x-override-rid": b"kvplane-0000000000000047",
        b"x-override-disagg-prefill-dp-rank": b"1",
    }
    assert dict(found.decode_headers) == shared
    assert dict(found.prefill_headers) == shared | {b"x-override-routed-dp-rank": b"1"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": ["a"]}),
        LISTS["n of a chat"][:2],
    ],
)
def test_what_headers_cannot_say_is_said_in_the_body(path: str, body: dict[str, Any]) -> None:
    found = written("sglang-headers", path, body)
    assert found.decode_headers == ()
    assert "bootstrap_room" in sent(found.decode)


def test_a_unified_worker_has_one_leg_and_its_rank() -> None:
    ask = parse("/generate", b'{"text":"a"}', "id")
    assert HANDOFFS["none"].write(ask, [], Seats()) == Bodies(None, ask.raw)
    pinned = HANDOFFS["none"].write(ask, [], Seats(decode_dp=4, decode_rank=2))
    assert sent(pinned.decode)["routed_dp_rank"] == 2
    pinned = HANDOFFS["none-vllm"].write(ask, [], Seats(decode_dp=4, decode_rank=2))
    assert (pinned.decode, dict(pinned.decode_headers)) == (
        ask.raw,
        {b"x-data-parallel-rank": b"2"},
    )

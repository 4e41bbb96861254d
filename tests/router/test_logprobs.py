"""Log-probabilities of two legs as one answer: FR-AP-05."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvplane.router.logprobs import Merge, needed
from kvplane.router.request import parse

INPUT = [[None, 1, None], *([-0.5 - at, at, None] for at in range(2, 7))]
OUTPUT = [[-1.25 * at, at, None] for at in range(8)]
PREFILL = {
    "text": "t",
    "meta_info": {
        "id": "r",
        "input_token_logprobs": INPUT,
        "input_top_logprobs": [None, *([[-0.5, at, None]] for at in range(5))],
        "output_token_logprobs": OUTPUT[:1],
    },
}
DECODE = {
    "text": "t t",
    "meta_info": {"id": "r", "input_token_logprobs": [], "output_token_logprobs": OUTPUT},
}


def merge(*prefill: Any, stream: bool = False) -> Merge:
    made = Merge()
    events = b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in prefill)
    made.prefill(events if stream else json.dumps(prefill[0]).encode())
    return made


def test_a_plain_answer_has_prefills_six_and_decodes_eight_in_their_fields() -> None:
    got = json.loads(merge(PREFILL).whole(json.dumps(DECODE).encode()))
    meta = got["meta_info"]
    assert meta["input_token_logprobs"] == INPUT
    assert meta["output_token_logprobs"] == OUTPUT
    assert meta["input_top_logprobs"] == PREFILL["meta_info"]["input_top_logprobs"]  # type: ignore[index]
    assert (got["text"], meta["id"]) == ("t t", "r")


@pytest.mark.parametrize("own", [[], None, [[-9.0, 9, None]]], ids=["empty", "null", "one"])
def test_what_decode_has_comes_after_prefills(own: Any) -> None:
    decode = {"meta_info": {"input_token_logprobs": own}}
    got = json.loads(merge(PREFILL).whole(json.dumps(decode).encode()))
    assert got["meta_info"]["input_token_logprobs"] == INPUT + (own or [])


def test_a_decode_that_tells_the_prompt_itself_is_not_told_it_twice() -> None:
    decode = {"meta_info": {"input_token_logprobs": INPUT}}
    got = json.loads(merge(PREFILL).whole(json.dumps(decode).encode()))
    assert got["meta_info"]["input_token_logprobs"] == INPUT


def test_a_list_is_merged_item_by_item() -> None:
    other = {"meta_info": {"input_token_logprobs": [[-7.0, 7, None]]}}
    made = Merge()
    made.prefill(json.dumps([PREFILL, other]).encode())
    got = json.loads(made.whole(json.dumps([DECODE, DECODE]).encode()))
    found = [one["meta_info"]["input_token_logprobs"] for one in got]
    assert found == [INPUT, [[-7.0, 7, None]]]


def test_numbers_keep_their_bytes() -> None:
    made = Merge()
    made.prefill(b'{"meta_info":{"input_token_logprobs":[[-1.50,1E1,null]]}}')
    got = made.whole(b'{"x": 1.230, "meta_info":{"output_token_logprobs":[[-2.50e0, 3, null]]}}')
    for number in (b"1.230", b"-1.50", b"1E1", b"-2.50e0"):
        assert number in got


@pytest.mark.parametrize(
    "answer", [b"no JSON", b"[1]", b'{"meta_info":3}', b"{", b'{"text":"a"}', b"", b"[[]]"]
)
def test_what_cannot_be_merged_passes_as_it_is(answer: bytes) -> None:
    assert merge(PREFILL).whole(answer) == answer
    assert Merge().whole(answer) == answer


def streamed(made: Merge, stream: bytes, size: int) -> bytes:
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    out = [made.stream(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
    return b"".join(out)


def events(stream: bytes) -> list[Any]:
    lines = [line for line in stream.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


GROWING = [
    {"text": "t", "meta_info": {"input_token_logprobs": [], "output_token_logprobs": OUTPUT[:n]}}
    for n in (1, 4, 8)
]
STREAM = (
    b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in GROWING) + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_in_a_stream_the_prompts_part_appears_once_however_it_is_cut(
    size: int, line: bytes
) -> None:
    stream = STREAM.replace(b"\n", line)
    out = streamed(merge(PREFILL, stream=True), stream, size)
    got = [one["meta_info"] for one in events(out)]
    assert [len(one["input_token_logprobs"]) for one in got] == [6, 0, 0]
    assert [len(one["output_token_logprobs"]) for one in got] == [1, 4, 8]
    first = stream.index(line * 2)
    assert out.endswith(stream[first:])  # untouched from there on


def test_every_index_of_a_stream_has_its_own() -> None:
    told = [
        {"index": at, "meta_info": {"input_token_logprobs": [[-at, at, None]]}} for at in (1, 0)
    ]
    made = merge(*told, stream=True)
    out = streamed(made, STREAM.replace(b'{"text', b'{"index": 1, "text') + STREAM, 33)
    got = [one["meta_info"]["input_token_logprobs"] for one in events(out)]
    assert got == [[[-1, 1, None]], [], [], [[0, 0, None]], [], []]


def test_comments_and_errors_of_a_stream_pass() -> None:
    stream = b': hello\n\ndata: {"error":{"message":"x"}}\n\ndata: half'
    assert streamed(merge(PREFILL), stream, 5) == stream


def test_a_stream_passes_at_once_where_prefill_told_nothing() -> None:
    assert Merge().stream(b"data: ha", last=False) == b"data: ha"


def test_an_event_that_does_not_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.router.logprobs.MOST_BYTES", 10)
    assert merge(PREFILL).stream(b"data: 12345", last=False) == b"data: 12345"


@pytest.mark.parametrize(
    "inside", [b"\xff", b"\\ud800", b"\xed\xa0\x80"], ids=["byte", "half", "three"]
)
@pytest.mark.parametrize("form", [b"%b", b"[%b]", b"data: %b\n\n"], ids=["plain", "list", "stream"])
def test_prefills_bytes_that_are_no_text_leave_decodes_answer_as_it_came(
    form: bytes, inside: bytes
) -> None:
    made, answer = Merge(), b'{"choices":[{"index":0,"logprobs":{"tokens":["b"]}}]}'
    made.prefill(form % (b'{"choices":[{"logprobs":{"tokens":["a","b"],"%b":[1]}}]}' % inside))
    assert made.whole(answer) == answer


def test_an_echo_of_the_openai_route_has_the_prompts_too() -> None:
    prompt = {
        "tokens": ["a", "b", "t"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0}, {"t": -2.0}],
        "text_offset": [0, 1, 2],
    }
    own = {
        "tokens": ["t", "u"],
        "token_logprobs": [-2.0, -3.0],
        "top_logprobs": None,
        "text_offset": [2, 3],
    }
    choice = {"index": 0, "text": "abtu", "logprobs": own}
    made = merge({"choices": [{"index": 0, "text": "abt", "logprobs": prompt}]})
    got = json.loads(made.whole(json.dumps({"id": "x", "choices": [choice]}).encode()))
    found = got["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", "t", "u"]
    assert found["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["top_logprobs"] == [None, {"b": -1.0}]
    assert (got["id"], got["choices"][0]["text"]) == ("x", "abtu")


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/generate", {"text": "a"}, False),
        ("/generate", {"text": "a", "return_logprob": True}, True),
        ("/generate", {"text": ["a", "b"], "return_logprob": [False, True]}, True),
        ("/generate", {"text": ["a", "b"], "return_logprob": [False, False]}, False),
        ("/v1/completions", {"prompt": "a", "logprobs": 1}, False),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "logprobs": True}, False),
    ],
)
def test_only_what_prefill_alone_can_tell_is_waited_for(
    path: str, body: dict[str, Any], asked: bool
) -> None:
    assert needed(parse(path, json.dumps(body).encode(), "id")) is asked


@pytest.mark.parametrize("seed", range(3))
def test_whatever_engines_say_something_comes_out(seed: int) -> None:
    """Answers with bytes changed, left out and doubled: merged or as they came, never an error."""
    chance = random.Random(seed)
    plain = (
        json.dumps(PREFILL).encode(),
        json.dumps(DECODE).encode(),
        json.dumps([DECODE]).encode(),
    )
    for _ in range(300):
        told, answer = (spoilt(chance, chance.choice([*plain, STREAM])) for _ in range(2))
        made = Merge()
        made.prefill(told)
        assert made.whole(answer)
        made.prefill(plain[0])
        assert streamed(made, answer, chance.randrange(1, 90))


def spoilt(chance: random.Random, text: bytes) -> bytes:
    """Up to three places of it are not as they were."""
    for _ in range(chance.randrange(4)):
        at, end = sorted(chance.randrange(len(text)) for _ in range(2))
        put = chance.choice([b"", b"[", b"}", b"\xff", b"null", b'"', b"-1", text[at : at + 9]])
        text = text[:at] + put + text[chance.choice([at, end]) :] or b"x"
    return text

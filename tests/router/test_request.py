"""Request: what is refused, and with which member named."""

from __future__ import annotations

import pytest

from kvplane.router.errors import GatewayError
from kvplane.router.legs_wire import FORWARDED
from kvplane.router.request import parse, sane_id

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"

BAD = [
    (CHAT, b"", None),
    (CHAT, b"{", None),
    (CHAT, b"[]", None),
    (CHAT, b"null", None),
    (CHAT, b'{"messages":[NaN]}', None),
    (CHAT, b"\xff", None),
    (CHAT, b"[" * 100_000, None),
    (CHAT, b'{"a":1e999}', None),
    (CHAT, b"{}", "messages"),
    (CHAT, b'{"messages":"x"}', "messages"),
    (CHAT, b'{"messages":[]}', "messages"),
    (CHAT, b'{"messages":["x"]}', "messages[0]"),
    (CHAT, b'{"messages":[{"content":"x"}]}', "messages[0].role"),
    (CHAT, b'{"messages":[{"role":"user","content":5}]}', "messages[0].content"),
    (CHAT, b'{"model":5,"messages":[{"role":"user","content":"x"}]}', "model"),
    (CHAT, b'{"stream":"yes","messages":[{"role":"user","content":"x"}]}', "stream"),
    (CHAT, b'{"n":0,"messages":[{"role":"user","content":"x"}]}', "n"),
    (CHAT, b'{"n":true,"messages":[{"role":"user","content":"x"}]}', "n"),
    (CHAT, b'{"n":1000000,"messages":[{"role":"user","content":"x"}]}', "n"),
    (CHAT, b'{"max_tokens":"5","messages":[{"role":"user","content":"x"}]}', "max_tokens"),
    (CHAT, b'{"max_tokens":-1,"messages":[{"role":"user","content":"x"}]}', "max_tokens"),
    (TEXT, b'{"model":"' + b"m" * 1025 + b'","prompt":"x"}', "model"),
    (TEXT, b"{}", "prompt"),
    (TEXT, b'{"prompt":[]}', "prompt"),
    (TEXT, b'{"prompt":5}', "prompt"),
    (TEXT, b'{"prompt":["a",1]}', "prompt"),
    (TEXT, b'{"prompt":[true,1]}', "prompt"),
    (TEXT, b'{"prompt":[[]]}', "prompt[0]"),
    (TEXT, b'{"prompt":[[1],["a"]]}', "prompt[1]"),
    (TEXT, b'{"prompt":[-1]}', "prompt"),
    (TEXT, b'{"prompt":[4294967296]}', "prompt"),
    (TEXT, b'{"prompt":["a","b"' + b',"a"' * 40 + b'],"n":128}', "n"),
    (TEXT, b'{"prompt":"a","extra_key":["x"]}', "extra_key"),
    (TEXT, b'{"prompt":[1,2],"extra_key":[]}', "extra_key"),
    (CHAT, b'{"extra_key":["x"],"messages":[{"role":"user","content":"x"}]}', "extra_key"),
    (GENERATE, b"{}", "text"),
    (GENERATE, b'{"text":"a","input_ids":[1]}', "input_ids"),
    (GENERATE, b'{"text":[1]}', "text"),
    (GENERATE, b'{"input_ids":"a"}', "input_ids"),
    (GENERATE, b'{"input_ids":["a"]}', "input_ids"),
    (GENERATE, b'{"text":"a","sampling_params":5}', "sampling_params"),
    (GENERATE, b'{"text":"a","sampling_params":{"n":"2"}}', "n"),
]


@pytest.mark.parametrize(("path", "raw", "param"), BAD)
def test_a_wrong_body_is_a_400_that_names_the_member(
    path: str, raw: bytes, param: str | None
) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(path, raw, "id")
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert caught.value.param == param


GOOD = [
    (CHAT, b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}', 1, False, 1),
    (CHAT, b'{"messages":[{"role":"assistant"}],"n":4,"stream":null}', 1, False, 4),
    (TEXT, b'{"prompt":""}', 1, False, 1),
    (TEXT, b'{"prompt":["a"]}', 1, True, 1),
    (TEXT, b'{"prompt":["a","b"],"n":2}', 2, True, 2),
    (TEXT, b'{"prompt":["a","b"],"extra_key":["x","y"]}', 2, True, 1),
    (TEXT, b'{"prompt":"a","extra_key":"x"}', 1, False, 1),
    (TEXT, b'{"prompt":[1,2,3]}', 1, False, 1),
    (TEXT, b'{"prompt":[[1],[2]]}', 2, True, 1),
    (GENERATE, b'{"text":["a","b","c"]}', 3, True, 1),
    (GENERATE, b'{"input_ids":[[1,2]],"sampling_params":{"n":2}}', 1, True, 2),
    (GENERATE, b'{"input_embeds":[[0.5]]}', 1, False, 1),
]


@pytest.mark.parametrize(("path", "raw", "prompts", "batched", "samples"), GOOD)
def test_prompts_and_samples_are_counted(
    path: str, raw: bytes, prompts: int, batched: bool, samples: int
) -> None:
    ask = parse(path, raw, "id")
    assert (ask.prompts, ask.batched, ask.samples) == (prompts, batched, samples)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-1", True),
        (b"", False),
        (None, False),
        (b"a b", False),
        (b"a\r\nb", False),
        (b"\xff", False),
        (b"x" * 200, False),
    ],
)
def test_a_request_id_is_taken_over_only_where_it_is_harmless(
    given: bytes | None, kept: bool
) -> None:
    assert (sane_id(given, lambda: "made") != "made") is kept


def test_headers_that_concern_no_engine_are_let_go() -> None:
    body = b'{"prompt":"x"}'
    plain = ((b"host", b"h"), (b"content-type", b"application/json"))
    assert parse(TEXT, body, "r", plain).headers == ()
    for name in FORWARDED:
        told = (*plain, (name, b"x"))
        assert parse(TEXT, body, "r", told).headers == told

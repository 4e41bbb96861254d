"""Usage: the cached tokens of prefill's answer, wherever an engine puts them."""

from __future__ import annotations

import pytest

from kvplane.router.usage import MOST_BYTES, Usage

OPENAI = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":%d}}}'
NATIVE = b'{"text":"x","meta_info":{"cached_tokens":%d}}'

CASES = [
    (b"", None),
    (b"{}", None),
    (b"nonsense", None),
    (OPENAI % 48, 48),
    (NATIVE % 0, 0),
    (b"[" + NATIVE % 16 + b"," + NATIVE % 32 + b"]", 48),
    (b'{"usage":{"prompt_tokens_details":null}}', None),
    (b'{"usage":{"prompt_tokens_details":{}},"meta_info":{"cached_tokens":5}}', 5),
    (OPENAI[:-1] % -5 + b',"meta_info":{"cached_tokens":5}}', 5),
    (b'{"usage":"cached_tokens","meta_info":{"cached_tokens":5}}', 5),
    (b'{"usage":{"prompt_tokens_details":{"cached_tokens":1.0}}}', None),
    (b' {"meta_info":{"cached_tokens":5}}', None),
    (b'{"meta_info":{"cached_tokens":5},"text":"\\"cached_tokens\\":7"}', 5),
    (b'{"meta_info":{"cached_tokens":5}', None),
    (b'{"usage":{"prompt_tokens_details":{"cached_tokens":true}}}', None),
    (b"data: " + NATIVE % 1 + b"\n\ndata: " + NATIVE % 32 + b"\n\ndata: [DONE]\n\n", 32),
    (b'data: {"choices":[]}\r\n\r\ndata: ' + OPENAI % 7 + b"\r\n\r\n", 7),
]


@pytest.mark.parametrize(("data", "count"), CASES)
def test_cached_tokens_are_found_however_the_answer_was_cut(data: bytes, count: int | None) -> None:
    for step in (1, 7, 1000):
        usage = Usage()
        for at in range(0, len(data), step):
            usage.feed(data[at : at + step])
        assert usage.cached_tokens() == count


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (OPENAI % 48, None),
        (b'{"error":null}', None),
        (b'{"text":"\\"error\\""}', None),
        (b'{"error":"no","usage":7}', ("no", None)),
        (b'{"error":{"message":"no","stage":"verify"}}', ("no", "verify")),
        (b'{"usage":{"prompt_tokens_details":7},"error":{"message":"no"}}', ("no", None)),
        (b'{"error":{"message":"no"}', None),
    ],
)
def test_an_error_in_a_plain_answer_is_told(data: bytes, said: object) -> None:
    for step in (1, 1000):
        usage = Usage()
        for at in range(0, len(data), step):
            usage.error()  # may be asked before it is whole
            usage.feed(data[at : at + step])
        assert usage.error() == said


def test_a_long_stream_keeps_its_end() -> None:
    usage = Usage()
    for _ in range(100):
        usage.feed(b"data: " + b"x" * 10_000 + b"\n\n")
    usage.feed(b"data: " + OPENAI % 5 + b"\n\n")
    assert usage.cached_tokens() == 5
    assert len(usage._data) <= MOST_BYTES


def test_the_last_event_that_says_a_number_counts() -> None:
    usage = Usage()
    for count in range(100):
        usage.feed(b"data: " + NATIVE % count + b"\n\n")
    usage.feed(b'data: {"meta_info":{"cached_tokens":null}}\n\ndata: {"cached_tokens":\n\n')
    assert usage.cached_tokens() == 99


def test_an_error_event_is_told() -> None:
    usage = Usage()
    usage.feed(b'data: {"error":{"message":"gone","stage":"verify"}}\n\n')
    assert usage.error() == ("gone", "verify")
    assert Usage().error() is None


@pytest.mark.parametrize("count", [-1, 2**32, 10**30])
def test_a_count_that_cannot_be_is_no_count(count: int) -> None:
    usage = Usage()
    usage.feed(OPENAI % count)
    assert usage.cached_tokens() is None


@pytest.mark.parametrize("stage", ["[]", "{}", "7", "null", '"nonsense"'])
def test_a_stage_nobody_knows_is_no_stage(stage: str) -> None:
    usage = Usage()
    usage.feed(b'data: {"error":{"message":"m","stage":%s}}\n\n' % stage.encode())
    assert usage.error() == ("m", None)

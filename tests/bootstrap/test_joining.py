"""Joining: frames in any pieces, garbage refused, proofs that cannot be reused."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.bootstrap import BootstrapError
from kvplane.bootstrap.joining import (
    MOST_HELLO,
    Answer,
    Ask,
    BadFrame,
    Beat,
    Cancel,
    Challenge,
    Failed,
    Frames,
    Hello,
    Message,
    Refusal,
    Welcome,
    frame,
    is_signed,
    signed,
)

N1, N2, N3 = b"1" * 32, b"2" * 32, b"3" * 32
HELLO = Hello(
    protocol="p", node_rank=1, nnodes=2, generation="g", nonce=N2, facts={"tp": "4"}, proof=b""
)
WELCOME = Welcome(generation="g", bootstrap_host="", bootstrap_port=8998)
ALL: list[Message] = [
    Challenge(protocol="p", nonce=N1), HELLO, WELCOME, Refusal(reason="no", final=True), Beat(),
    Ask(id=1, body=b"\x00\xff"), Answer(id=1, body=b""), Failed(id=2**40, reason="x"), Cancel(id=3),
]  # fmt: skip


@given(st.lists(st.sampled_from(ALL), max_size=8), st.lists(st.integers(1, 40), max_size=20))
def test_messages_arrive_whole_in_whatever_pieces_they_come(
    sent: list[Message], cuts: list[int]
) -> None:
    stream = b"".join(map(frame, sent))
    frames, got = Frames(), []
    for cut in cuts:
        got += frames.feed(stream[:cut])
        stream = stream[cut:]
    got += frames.feed(stream)
    assert got == sent


def test_half_a_frame_is_nothing_yet() -> None:
    frames, whole = Frames(), frame(HELLO)
    for i in range(len(whole)):
        assert frames.feed(whole[i : i + 1]) == ([HELLO] if i == len(whole) - 1 else [])


@pytest.mark.parametrize("garbage", [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff",
    struct.pack(">I", MOST_HELLO + 1), struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    struct.pack(">I", 1) + b"\x80", struct.pack(">I", 1000) + b"\x91" * 1000,
    *(struct.pack(">I", len(raw)) + raw for raw in (
        msgspec.msgpack.encode({"t": "unknown"}), msgspec.msgpack.encode({"t": "ask", "id": "1"}),
        msgspec.msgpack.encode({"t": "hello"}), msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"t": "ask", "id": 1, "body": "text"}), b"\xa3\xff\xfe\xfd",
    )),
])  # fmt: skip
def test_garbage_is_a_bad_frame_and_one_of_our_errors(garbage: bytes) -> None:
    with pytest.raises(BadFrame) as caught:
        Frames().feed(garbage)
    assert isinstance(caught.value, BootstrapError)


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_bad_frame(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        Frames().feed(data)


def test_members_nobody_knows_are_ignored() -> None:
    raw = msgspec.msgpack.encode({"t": "cancel", "id": 3, "later": True})
    assert Frames().feed(struct.pack(">I", len(raw)) + raw) == [Cancel(id=3)]


def test_what_is_held_is_bounded_before_and_after_a_node_has_joined() -> None:
    body = b"x" * (MOST_HELLO + 1)
    with pytest.raises(BadFrame, match="must be 1 to 65536"):
        Frames().feed(frame(Ask(id=1, body=body))[:4])
    wide = Frames(2**20)
    assert wide.feed(frame(Ask(id=1, body=body))) == [Ask(id=1, body=body)]


def test_a_proof_holds_for_its_secret_its_side_its_nonces_and_its_words_only() -> None:
    told = signed("key", "node", N1, N2, HELLO)
    assert is_signed("key", "node", N1, N2, told)
    for wrong in (
        is_signed("other", "node", N1, N2, told),
        is_signed("key", "leader", N1, N2, told),
        is_signed("key", "node", N3, N2, told),
        is_signed("key", "node", N1, N3, told),
        is_signed("key", "node", N1, b"short", signed("key", "node", N1, b"short", HELLO)),
        is_signed("key", "node", N1, N2, msgspec.structs.replace(told, node_rank=0)),
        is_signed("key", "node", N1, N2, HELLO),
    ):
        assert not wrong
    assert b"key" not in frame(told)


def test_without_a_secret_there_is_nothing_to_prove() -> None:
    assert signed("", "leader", N1, N2, WELCOME) == WELCOME
    assert is_signed("", "leader", N1, N2, signed("key", "leader", N1, N2, WELCOME))

"""frames.py and tcp_frames.py: what is a message, and what is garbage."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.transfer import Layout, TransferSettings
from kvplane.transfer.backends import Offer, Ticket, tcp_frames
from kvplane.transfer.errors import GenerationMismatch, Refused, RoomMismatch
from kvplane.transfer.frames import (
    MOST_BIND,
    MOST_SMALL,
    PROTOCOL,
    AbortFrame,
    BadFrame,
    BindFrame,
    BoundFrame,
    CommitFrame,
    FailedFrame,
    OtherProtocol,
    RefusedFrame,
    VerdictFrame,
    bind_faults,
    decode_frame,
    encode_frame,
    frame_length,
)
from kvplane.transfer.metadata import record_bytes
from kvplane.transfer.terms import Terms, unreachable
from kvplane.vocabulary import Generation, Room

LAYOUT = Layout("m", 16, "float16", 2, 2, 16, 2048)
OFFER = Offer("tcp", 1, "127.0.0.1", 4000, (2048, 2048), ("l0", "l1"))


def bind(**changes: object) -> BindFrame:
    facts: dict[str, object] = {
        "protocol": PROTOCOL, "room": 71, "attempt": 5, "generation": "d1", "layout": LAYOUT,
        "offer": OFFER, "pages": (4, 2), "tokens": 32, "aux_bytes": record_bytes(2),
    }  # fmt: skip
    return BindFrame(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frame",
    [
        bind(), bind(held_pages=3, expected="p1", sums=False), BoundFrame(generation="p1"),
        RefusedFrame(kind="layout", reason="r", fields=("a", "b")), FailedFrame(reason="r"),
        CommitFrame(pages=2), VerdictFrame(ok=False, kind="room", reason="r"),
        AbortFrame(reason="r"),
    ],
    ids=lambda frame: type(frame).__name__,
)  # fmt: skip
def test_every_frame_is_read_back(frame) -> None:
    data = encode_frame(frame)
    assert frame_length(data[:4], MOST_SMALL) == len(data) - 4
    assert decode_frame(data[4:]) == frame


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_frame(data)


def test_another_version_is_told_before_anything_else_is_read() -> None:
    body = msgspec.msgpack.encode({"t": "bind", "protocol": 9, "room": "not even a number"})
    with pytest.raises(OtherProtocol, match="protocol version 9, this is 2"):
        decode_frame(body)


def test_deeply_nested_bytes_are_no_frame() -> None:
    with pytest.raises(BadFrame):
        decode_frame(b"\x81\xa1x" + b"\x91" * 60_000 + b"\x00")


@pytest.mark.parametrize("length", [0, MOST_SMALL + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(BadFrame, match=f"frame of {length} bytes"):
        frame_length(length.to_bytes(4, "big"), MOST_SMALL)


def test_the_largest_bind_fits_its_bound() -> None:
    pages = tuple(range(2**32 - TransferSettings().most_pages, 2**32))
    assert len(encode_frame(bind(pages=pages))) < MOST_BIND


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"room": 0}, "room 0"),
        ({"room": 2**63}, "room"),
        ({"attempt": 0}, "attempt 0"),
        ({"pages": (1, 1)}, "different"),
        ({"pages": (-1,)}, "32 bit"),
        ({"pages": (2**32,)}, "32 bit"),
        ({"pages": tuple(range(11))}, "at most 10"),
        ({"tokens": -1}, "tokens -1"),
        ({"held_pages": -1}, "held_pages -1"),
        ({"shard": 2, "shards": 2}, "shard 2 of 2"),
        ({"shards": 5000}, "at most 1024"),
        ({"regions": ("l0", "l0")}, "different names"),
        ({"sources": 0}, "sources 0"),
        ({"prompt": "a" * 65}, "prompt: must be a sum of at most 64 characters"),
    ],
)
def test_a_bind_that_cannot_be_meant_names_the_field(changes: dict[str, object], word: str) -> None:
    assert word in (bind_faults(bind(**changes), most_pages=10) or "")
    assert bind_faults(bind(), most_pages=10) is None


TERMS = Terms(OFFER, LAYOUT, Generation("p1"), TransferSettings())


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"room": 0}, "refused", "room 0"),
        ({"aux_bytes": 10}, "refused", "aux_bytes 10"),
        ({"layout": replace(LAYOUT, dtype="int8")}, "layout", "dtype float16 here, int8 there"),
        ({"offer": replace(OFFER, backend="nixl")}, "layout", "backend tcp here, nixl there"),
        ({"offer": replace(OFFER, items=(1, 2048))}, "layout", "region l0 of 2048 bytes"),
        ({"regions": ("l9",)}, "layout", "region l9 missing here"),
        ({"offer": replace(OFFER, host="0.0.0.0")}, "refused", "wildcard"),
        ({"sums": False}, "layout", "checksums True here, False there"),
        ({"expected": "p0"}, "generation", "p0 was asked for"),
    ],
)
def test_terms_refuse_with_a_reason(changes: dict[str, object], kind: str, words: str) -> None:
    refused = TERMS.refusal(bind(**changes), "127.0.0.1")
    assert refused is not None and refused.kind == kind and words in refused.reason


def test_terms_are_met() -> None:
    assert TERMS.refusal(bind(), "127.0.0.1") is None
    assert TERMS.refusal(bind(expected="p1"), "127.0.0.1") is None


@pytest.mark.parametrize(
    ("told", "seen", "fine"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.7", False),
        ("::1", "10.0.0.7", False),
        ("::", "::1", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("10.0.0.7", "10.0.0.7", True),
        ("decode-3", "10.0.0.7", True),
        ("", "10.0.0.7", False),
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused(told: str, seen: str, fine: bool) -> None:
    assert (unreachable(told, seen) is None) is fine


TICKET = Ticket(5, Room(71), Generation("d1"), (4, 2), 64, "prefill:1")
HEAD = tcp_frames.Head(
    tcp_frames.Kind.PAGES, 71, 5, tcp_frames.digest("d1"), 2, 2,
    tcp_frames.body_bytes(2, 2), 2 * 4096,
)  # fmt: skip


def test_a_head_is_read_back_and_fits_its_ticket() -> None:
    assert tcp_frames.decode_head(HEAD.encode()) == HEAD
    assert tcp_frames.head_fault(HEAD, TICKET, OFFER.items) is None
    body = tcp_frames.encode_pages((4, 2), OFFER.items)
    assert tcp_frames.decode_pages(HEAD, body) == ((4, 2), OFFER.items)


@given(st.integers(0, tcp_frames.HEAD_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_head_is_noticed(at: int, change: int) -> None:
    raw = bytearray(HEAD.encode())
    raw[at] ^= change
    with pytest.raises(tcp_frames.BadHead):
        tcp_frames.decode_head(bytes(raw))


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_no_head(data: bytes) -> None:
    with pytest.raises(tcp_frames.BadHead):
        tcp_frames.decode_head(data)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"room": 72}, RoomMismatch),
        ({"generation": 1}, GenerationMismatch),
        ({"pages": 3}, Refused),
        ({"pages": 0}, Refused),
        ({"regions": 1}, Refused),
        ({"body_bytes": 2**31}, Refused),
        ({"total_bytes": 2**40}, Refused),
        ({"kind": tcp_frames.Kind.RECORD}, Refused),
        ({"kind": tcp_frames.Kind.RECORD, "pages": 0, "regions": 0, "body_bytes": 0}, Refused),
    ],
)
def test_a_head_against_its_ticket_is_refused_before_payload(changes, kind) -> None:
    fault = tcp_frames.head_fault(replace(HEAD, **changes), TICKET, OFFER.items)
    assert isinstance(fault, kind)

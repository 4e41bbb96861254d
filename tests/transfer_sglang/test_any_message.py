"""SGLang's messages: whatever is said comes back, whatever is no message is named."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kit.sglang import METADATA, REGISTERS

from kvplane.transfer.sglang import FORMS, BadFrame, read_at_decode, read_at_prefill, write
from kvplane.transfer.sglang.fields import MOST_FRAMES

number32, number64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
signed, count = st.integers(-(2**31), 2**31 - 1), st.integers(1, 2**31 - 1)
name = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
some = {
    "host": name, "session": name, "agent": name, "port": st.integers(1, 65535),
    "blob": st.binary(max_size=40), "engine": st.binary(max_size=40), "tp": count, "dcp": count,
    "kinds": st.lists(st.sampled_from(["VRAM", "DRAM"]), max_size=3).map(tuple),
    "room": st.integers(0, 2**63 - 1), "receivers": count, "dummy": st.booleans(),
    "pages": st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    "prefix_tokens": st.none() | st.integers(0, 2**40), "staging_base": number64,
    "device_pages": st.none() | st.lists(signed, min_size=1, max_size=3).map(tuple),
}  # fmt: skip
of64 = ("kv", "aux", "items", "staging_layers")
lists_of = {"state": number64, "state_bytes": number64}


def strategy(message: Any, register: bool) -> st.SearchStrategy[Any]:
    """Any message of the type of this one."""
    given_: dict[str, st.SearchStrategy[Any]] = {}
    for one in fields(message):
        value, key = getattr(message, one.name), one.name
        if key == "frames":
            continue
        if key == "engine" and isinstance(value, str):
            given_[key] = name
        elif key == "aux" and not register:
            given_[key] = st.integers(0, 2**31 - 1)
        elif key in some:
            given_[key] = some[key]
        elif isinstance(value, tuple) and any(isinstance(part, bytes) for part in value):
            given_[key] = st.lists(st.binary(max_size=9), max_size=4).map(tuple)
        elif isinstance(value, tuple) and value and isinstance(value[0], tuple):
            part = st.binary(max_size=9) if isinstance(value[0][0], bytes) else (
                signed if not register else lists_of.get(key, number32))  # fmt: skip
            given_[key] = st.lists(st.lists(part, max_size=3).map(tuple), max_size=3).map(tuple)
        elif isinstance(value, tuple):
            given_[key] = st.lists(number64 if key in of64 else number32, max_size=4).map(tuple)
        else:
            given_[key] = st.integers(0, 2**31 - 1)
    return st.builds(type(message), **given_)


messages = st.one_of(
    st.tuples(st.just(backend), strategy(table[backend], table is REGISTERS))
    for backend in ("mooncake", "nixl", "mori")
    for table in (REGISTERS, METADATA)
)


@given(messages)
def test_any_register_and_metadata_comes_back(case: tuple[str, Any]) -> None:
    backend, message = case
    frames = write(backend, message)
    assert read_at_prefill(backend, frames) == message
    assert write(backend, read_at_prefill(backend, frames)) == frames


WORDS = [b"None", b"ABORT", b"ABORT_ACK", b"BOOTSTRAP", b"AUX_DATA", b"KV_STATUS", b"NixlMsgGuard",
         b"MoriMsgGuard", b"CHUNK_READY", b"7", b"127.0.0.1", b"4000", b"",
         b"\xdc\0\1", b"\x91" * 99,
         *write("nixl", REGISTERS["nixl"])]  # fmt: skip
garbage = st.lists(st.sampled_from(WORDS) | st.binary(max_size=40), max_size=30)


@given(st.sampled_from(sorted(FORMS)), garbage)
def test_any_garbage_is_a_bad_frame_and_nothing_else(backend: str, frames: list[bytes]) -> None:
    for read in (read_at_prefill, read_at_decode):
        try:
            found = read(backend, frames)
        except BadFrame as bad:
            assert 0 <= bad.frame <= MOST_FRAMES and "must be" in str(bad) and bad.field
        else:
            assert write(backend, found)


@given(messages, st.data())
def test_one_spoilt_frame_is_a_bad_frame_of_that_number(
    case: tuple[str, Any], data: st.DataObject
) -> None:
    backend, message = case
    frames = write(backend, message)
    at = data.draw(st.integers(0, len(frames) - 1))
    spoilt = [*frames[:at], data.draw(st.binary(max_size=20)), *frames[at + 1 :]]
    try:
        read_at_prefill(backend, spoilt)
    except BadFrame as bad:
        assert bad.frame == at or at <= 1  # the first two say which form it is

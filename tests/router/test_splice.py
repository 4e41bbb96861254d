"""Splice: every byte that is not ours to change stays where it was."""

from __future__ import annotations

import json
import re
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.handoffs import reserved
from kvplane.router.splice import splice

TRIPLE = b'"bootstrap_host":"h","bootstrap_room":9223372036854775807'


def edited(raw: bytes) -> bytes:
    return splice(raw, msgspec.json.decode(raw), reserved, TRIPLE)


CASES = [
    (b"{}", b"{" + TRIPLE + b"}"),
    (b" { } \n", b" { " + TRIPLE + b"} \n"),
    (b'{"a":1e2}', b'{"a":1e2,' + TRIPLE + b"}"),
    (b'{"bootstrap_room":1}', b"{" + TRIPLE + b"}"),
    (b'{"bootstrap_room":1,"a":2}', b'{"a":2,' + TRIPLE + b"}"),
    (b'{"a":2 , "bootstrap_room" : [1,{"b":"}"}] }', b'{"a":2 ,' + TRIPLE + b"}"),
    (b'{"bootstrap\\u005froom":1,"a":2}', b'{"a":2,' + TRIPLE + b"}"),
    (b'{"bootstrap_room":1,"bootstrap_room":2,"a":3}', b'{"a":3,' + TRIPLE + b"}"),
    (b'{"a":{"bootstrap_room":1}}', b'{"a":{"bootstrap_room":1},' + TRIPLE + b"}"),
    (b'{"a":"\\"}{,","routed_dp_rank":0}', b'{"a":"\\"}{,",' + TRIPLE + b"}"),
    (b'{"a\\"b":1,"bootstrap_x":null}', b'{"a\\"b":1,' + TRIPLE + b"}"),
]


@pytest.mark.parametrize(("raw", "want"), CASES)
def test_only_reserved_members_go_and_ours_come_last(raw: bytes, want: bytes) -> None:
    result = edited(raw)
    tidy = re.compile(rb"[ ]+(?=[,}\"])")
    assert tidy.sub(b"", result) == tidy.sub(b"", want)


def test_without_reserved_members_the_body_is_the_clients_up_to_its_last_brace() -> None:
    raw = b'{"x":0.10,  "y":1E5,"z":"\xc3\xa9\\u00e9","big":123456789012345678901234567890}'
    assert edited(raw) == raw[:-1] + b"," + TRIPLE + b"}"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"\\{},', max_size=5), inner)
    ),
    max_leaves=12,
)
names = st.sampled_from(
    ["bootstrap_room", "bootstrap_host", "routed_dp_rank", "kv_transfer_params", "bootstrap_é"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    st.lists(st.tuples(names, values), max_size=8),
    st.sampled_from(["", " ", "\n\t"]),
    st.booleans(),
)
def test_the_result_parses_to_the_original_plus_ours(
    members: list[tuple[str, object]], blank: str, escape: bool
) -> None:
    pieces = [
        f"{blank}{json.dumps(name, ensure_ascii=escape)}{blank}:{json.dumps(value, indent=1)}"
        for name, value in members
    ]
    raw = f"{blank}{{{','.join(pieces)}{blank}}}{blank}".encode()
    result = edited(raw)
    body = msgspec.json.decode(raw)
    want = {name: value for name, value in body.items() if not reserved(name)}
    assert msgspec.json.decode(result) == want | {
        "bootstrap_host": "h",
        "bootstrap_room": 2**63 - 1,
    }
    kept = [piece for piece, (name, _) in zip(pieces, members, strict=True) if not reserved(name)]
    at = 0
    for piece in kept:  # byte-identical, in order
        at = result.index(piece.encode(), at) + len(piece.encode())


LONG = {
    "ids": b'{"prompt":[' + b"1," * 500_000 + b'1],"bootstrap_room":1}',
    "texts": b'{"bootstrap_room":[' + b'"a",' * 500_000 + b'1],"prompt":"hi"}',
    "brackets": b'{"bootstrap_room":[' + b"[[[[[]]]]]," * 100_000 + b'1],"prompt":"hi"}',
    "members": b"{" + b",".join(b'"a%d":1' % at for at in range(100_000)) + b',"bootstrap_x":1}',
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_body_loses_its_reserved_members_in_no_time(name: str) -> None:
    raw = LONG[name]
    body = msgspec.json.decode(raw)
    begun = time.process_time()
    result = splice(raw, body, reserved)
    assert time.process_time() - begun < 1.0  # the event loop waits for it
    assert msgspec.json.decode(result) == {n: v for n, v in body.items() if not reserved(n)}


def test_values_of_a_long_body_keep_their_bytes() -> None:
    value = b'{ "x" : 0.10, "y":1E5 , "z":"\\u00e9" }'
    raw = b'{"pad":"' + b"a" * 100_000 + b'", "a" : ' + value + b' ,"bootstrap\\u005froom":[1,2]}'
    assert value in edited(raw) and b"[1,2]" not in edited(raw)
    assert msgspec.json.decode(edited(raw))["a"] == {"x": 0.1, "y": 1e5, "z": "é"}

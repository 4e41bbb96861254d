"""Splice: take members out of a JSON object and put others in, and leave every other byte alone.

Pure. Used by handoffs/. Numbers, order, blanks and members nobody knows reach the engine as the
client sent them. Of a long body that must lose members the values keep their bytes, and only the
blanks and doubles between them go. Open it to change how bodies are edited.

    {"a": 1e2, "bootstrap_room": 5, "b": []}  ->  {"a": 1e2, "b": [],"bootstrap_room":77}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
COPIED_BYTES = 8 * 1024  # above, a copy costs more than to go without
LONG_BYTES = 64 * 1024  # above, members are cut out by the decoder: 100 ns a token is too slow


def splice(
    raw: bytes, body: Mapping[str, Any], drop: Callable[[str], bool] | None, add: bytes = b""
) -> bytes:
    """`raw` without the top-level members that `drop` names (None: nobody need look), and with
    `add` at its end: members as JSON has them, without braces.

    `body` is `raw` decoded: it tells by its decoded keys whether anything must go, so that
    escapes in a name hide nothing. All doubles of a dropped name go.
    """
    empty = not body
    if drop is not None and (dropped := [name for name in body if drop(name)]):
        without = _without if len(raw) <= LONG_BYTES else _rebuilt
        raw = without(raw, frozenset(dropped))
        empty = len(body) == len(dropped)
    if not add:
        return raw
    return appended(raw, add, b"" if empty else b",")


def appended(raw: bytes, add: bytes, between: bytes = b",") -> bytes:
    """`raw`, an object that holds something, with `add` at its end."""
    end = raw.rindex(b"}")
    begin = raw[:end] if end < COPIED_BYTES else memoryview(raw)[:end]  # copied once, below
    return b"".join((begin, between, add, raw[end:]))


def _without(raw: bytes, dropped: frozenset[str]) -> bytes:
    start, ends = raw.index(b"{") + 1, _member_ends(raw)
    kept, begin = [], start
    for end in ends:
        segment = raw[begin:end]
        if _name(segment) not in dropped:
            kept.append(segment)
        begin = end + 1
    return raw[:start] + b",".join(kept) + raw[ends[-1] :]


def _rebuilt(raw: bytes, dropped: frozenset[str]) -> bytes:
    members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    kept = (
        msgspec.json.encode(name) + b":" + bytes(value)
        for name, value in members.items()
        if name not in dropped
    )
    return b"{" + b",".join(kept) + b"}"


def _member_ends(raw: bytes) -> list[int]:
    """Where each top-level member ends: at its comma, the last at the closing brace."""
    depth, ends = 0, []
    for token in TOKEN.finditer(raw):
        mark = raw[token.start()]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth == 0:
                ends.append(token.start())
                break
        elif mark == ord(",") and depth == 1:
            ends.append(token.start())
    return ends


def _name(segment: bytes) -> str:
    token = TOKEN.search(segment)
    assert token is not None, "a member begins with its name"
    return str(msgspec.json.decode(token[0]))

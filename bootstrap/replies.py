"""Replies: one response of a directory, ready to be sent.

Pure. answers.py, lookups.py and engine_info.py word them, api.py sends them. Open it to change what
a response is made of. Texts and labels are those of SGLang 0.5.23.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

GENERATION = "x-kvplane-generation"  # header: the life of the instance, on every answer of ours
MISSING_RANKS = "x-kvplane-missing"  # header: which ranks are not in, on 503
DIFFERING = "x-kvplane-differing"  # header: what the instance and a rank do not agree on
TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
MOST_HEADER = 1000  # characters of a header of ours

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: Headers = ()
    raw: tuple[tuple[bytes, bytes], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        length = str(len(self.body))
        told = (("content-type", self.kind), ("content-length", length), *self.headers)
        raw = tuple((name.encode(), value.encode()) for name, value in told)
        object.__setattr__(self, "raw", raw)  # once: an answer may be sent many times


def said(text: str, status: int = 200, kind: str = TEXT, headers: Headers = ()) -> Answer:
    """A text."""
    return Answer(status, text.encode(), kind, headers)


def told(value: Any, status: int = 200, headers: Headers = ()) -> Answer:
    """A JSON value, blanks after commas as SGLang writes it."""
    return Answer(status, json.dumps(value).encode(), JSON, headers)


def listed(name: str, items: tuple[str, ...]) -> Headers:
    """A header of several things, as far as they fit; none where there is nothing to say."""
    return ((name, "; ".join(items)[:MOST_HEADER]),) if items else ()


OK = said("OK")
NOT_FOUND = said("404: Not Found", 404)
WRONG_ROUTE_METHOD = said("Method not allowed", 405, JSON)  # SGLang labels this text JSON


def wrong_method(allow: str) -> Answer:
    """405 with the methods that are there."""
    return said("405: Method Not Allowed", 405, headers=(("allow", allow),))


def closing(text: str, status: int) -> Answer:
    """The connection is of no further use: its request was not read to the end."""
    return said(text, status, headers=(("connection", "close"),))


def with_headers(answer: Answer, headers: Headers) -> Answer:
    """The same with more headers."""
    return replace(answer, headers=answer.headers + headers) if headers else answer

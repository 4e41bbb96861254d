"""Promql: which series a query names, and whether it is put together as a query must be.

Enough of the language to hold the queries of deploy/ true; not a parser of all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:\\.|[^"\\])*")
    | (?P<number>\d+(?:\.\d+)?(?![a-zA-Z_]))
    | (?P<span>\[[^\]]*\])
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<mark>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>])
    )""",
    re.X,
)
FUNCTIONS = {
    "rate", "increase", "histogram_quantile", "sum", "max", "min", "avg", "count", "vector",
    "max_over_time",
}  # fmt: skip
WORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "bool"}
SPAN = re.compile(r"\[(\d+[smhd]|\$__rate_interval)\]")
PAIRS = {")": "(", "}": "{"}


@dataclass(frozen=True)
class Named:
    """One series of a query, and the labels it is asked about."""

    series: str
    labels: frozenset[str]


def named(query: str) -> list[Named]:
    """All series of a query. Raises ValueError where it cannot be one."""
    tokens = _tokens(query)
    _balanced(tokens, query)
    found, grouped = [], set()
    for at, (kind, text) in enumerate(tokens):
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if text in ("by", "without", "on", "ignoring"):
            grouped |= set(_inside(tokens, at + 1))
        elif kind == "name" and after == "(" and text not in WORDS:
            if text not in FUNCTIONS:
                raise ValueError(f"{text}: no function this knows, in {query}")
        elif text in FUNCTIONS and after in ("by", "without"):
            continue  # sum by (role) (...)
        elif kind == "name" and text not in WORDS and _is_series(tokens, at):
            found.append(Named(text, frozenset(_inside(tokens, at + 1, "{"))))
    return [Named(one.series, one.labels | (grouped - {"le"})) for one in found]


def _tokens(query: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(query.rstrip()):
        match = TOKEN.match(query, at)
        if match is None:
            raise ValueError(f"cannot be read from {query[at:]!r} on")
        kind = match.lastgroup or ""
        if kind == "span" and not SPAN.fullmatch(match[kind]):
            raise ValueError(f"{match[kind]}: must be a range like [5m]")
        found.append((kind, match[kind]))
        at = match.end()
    return found


def _balanced(tokens: list[tuple[str, str]], query: str) -> None:
    stack = []
    for kind, text in tokens:
        if kind == "mark" and text in PAIRS.values():
            stack.append(text)
        elif kind == "mark" and text in PAIRS and (not stack or stack.pop() != PAIRS[text]):
            raise ValueError(f"{text} closes nothing in {query}")
    if stack:
        raise ValueError(f"{stack[-1]} is never closed in {query}")


def _is_series(tokens: list[tuple[str, str]], at: int) -> bool:
    """Not a label: those stand in braces, or in the brackets of a grouping."""
    depth = 0
    for place in range(at - 1, -1, -1):
        text = tokens[place][1]
        if text in ("}", ")"):
            depth += 1
        elif text in ("{", "(") and depth:
            depth -= 1
        elif text == "{":
            return False
        elif text == "(":
            before = tokens[place - 1][1] if place else ""
            return before not in ("by", "without", "on", "ignoring")
    return True


def _inside(tokens: list[tuple[str, str]], at: int, opens: str = "(") -> list[str]:
    """The names in the brackets that begin here."""
    if at >= len(tokens) or tokens[at][1] != opens:
        return []
    closes = {one: other for other, one in PAIRS.items()}[opens]
    end = next(place for place in range(at, len(tokens)) if tokens[place][1] == closes)
    return [text for kind, text in tokens[at:end] if kind == "name"]

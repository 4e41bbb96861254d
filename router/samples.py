"""Samples: which prompts are compared with an engine, and how does a difference read?

Pure. self_check.py asks both sides. Open it to compare another kind of prompt.

    text    as /v1/completions has it, with special tokens
    chat    system, user, assistant, user         the template, and what it writes itself
    parts   a message of two text parts           how they are joined
    tools   a tool and a call of it               how they are shown
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plans import Body, Kind

SPECIAL: tuple[Kind, ...] = ("parts", "tools")  # differ where plain prompts may well be right
# Letters of several scripts, digits, marks, blanks and line breaks: what tokenizers part ways at.
TEXT = "Hello, wörld! It's 12345.67 €\n\n  def f(x):\treturn x**2 — 日本語 и ещё 🙂 "


@dataclass(frozen=True, slots=True)
class Sample:
    """A request both sides tokenise."""

    kind: Kind
    path: str
    body: Body


def samples(number: int) -> list[Sample]:
    """One of each kind; another `number` makes other prompts, which no cache has seen."""
    text = f"{TEXT}{number}"
    first = {"role": "system", "content": f"You are no. {number}."}
    chat = [
        first,
        {"role": "user", "content": text},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "And why?"}]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": f"Weather {number}", "parameters": schema}
    return [
        Sample("text", "/v1/completions", {"prompt": text}),
        _chat("chat", {"messages": chat}),
        _chat("parts", {"messages": [first, {"role": "user", "content": parts}]}),
        _chat("tools", {"messages": chat, "tools": [{"type": "function", "function": function}]}),
    ]


def _chat(kind: Kind, body: Body) -> Sample:
    return Sample(kind, "/v1/chat/completions", body)


def difference(kind: Kind, ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """Where two lists of tokens part; None where they are the same."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return f"{kind} of {len(theirs)} tokens there, {len(ours)} here, alike until one ends"
    return f"{kind}: token {at} is {theirs[at]} there, {ours[at]} here"

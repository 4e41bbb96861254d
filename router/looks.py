"""Looks: what a choice looks like in headers and in the ledger.

Pure. Choices of one pair whose tokens are not known are one object (choice.py), and so is their
look: worked out once, not for each request. facts.py adds what is the request's own. Open it to
show one more thing that follows from the choice alone.

    choice --- headers   prefill, decode, depth, knowledge
           \\-- ledger    both parties, why, whom their engines' stages can be asked of
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import msgspec

from kvplane.vocabulary import Knowledge

from .blame import DECODE, PREFILL
from .breaker import SUCCESS
from .choice import Choice
from .handoffs import HANDOFFS
from .remembered import Party, Why
from .target import Target

BOOTSTRAP_PORT = 8998  # SGLang's default, where neither flags nor the engine tell
TELLING = frozenset({"kvplane"})  # engines that have GET /rooms/{room}
MOST_KEPT = 1024  # looks; of pairs, and of how far they were believed

Header = tuple[bytes, bytes]


class Count(Protocol):
    """What is moved of a counter."""

    value: float


Legs = Mapping[tuple[object, ...], Count]  # by side, worker and outcome


class Look(msgspec.Struct, frozen=True, gc=False):
    """All of an attempt that its choice says already."""

    choice: Choice
    headers: tuple[Header, ...]
    model: str  # of the worker whose cache was judged
    prefill: Party | None
    decode: Party
    why: Why
    predicted_tokens: int | None
    directory: tuple[str, int] | None  # of the prefill, where somebody looks there
    sides: tuple[Target, ...]  # whom stages can be asked of
    silent: tuple[str, ...]  # makers of engines that tell none
    served: tuple[Count, ...]  # counters of its legs that went well


class Looks(dict[Choice, Look]):
    """Those that may be asked for again, kept at first use."""

    def __init__(self, legs: Legs) -> None:
        super().__init__()
        self._legs = legs

    def __missing__(self, choice: Choice) -> Look:
        made = look(choice, self._legs)
        if not choice.prompt_tokens:  # else it is this request's alone
            if len(self) >= MOST_KEPT:
                self.clear()
            self[choice] = made
        return made


def look(choice: Choice, legs: Legs) -> Look:
    """Made anew."""
    prefill, decode, holder = choice.prefill, choice.decode, choice.holder
    silent, told = _silent(decode.up.engine, holder.up.engine)
    both = () if prefill is None else (decode, prefill)
    served = (legs[DECODE, decode.name, SUCCESS],)
    directory = None
    if prefill is not None and HANDOFFS[prefill.way].directory:  # else nobody looks there
        directory = prefill.bootstrap_host, prefill.up.bootstrap_port or BOOTSTRAP_PORT
    return Look(
        choice,
        _headers(choice),
        holder.model,
        None if prefill is None else Party(prefill.name, prefill.url, choice.prefill_epoch),
        Party(decode.name, decode.url, choice.decode_epoch),
        _why(choice),
        choice.depth.predicted if choice.prompt_tokens else None,
        directory,
        tuple([one for one in both if one.up.engine in TELLING]) if told else (),
        silent,
        served if prefill is None else (*served, legs[PREFILL, prefill.name, SUCCESS]),
    )


def _why(choice: Choice) -> Why:
    depth = choice.depth
    return Why(
        depth.blocks,
        depth.asked,
        depth.tokens,
        choice.prompt_tokens or None,
        choice.prefill_policy,
        choice.decode_policy,
        choice.candidates,
        choice.knowledge,
        choice.reason,
        choice.alone or None,
    )


def _headers(choice: Choice) -> tuple[Header, ...]:
    depth = b"%d/%d" % (choice.depth.blocks, choice.depth.asked)
    return (
        *_pair(choice.holder.name, choice.decode.name),
        (b"x-kvplane-depth", depth),
        *_known(choice.knowledge, choice.reason),
    )


@lru_cache(4096)
def _pair(holder: str, decode: str) -> tuple[Header, ...]:
    return (
        (b"x-kvplane-prefill", holder.encode("latin-1", "replace")),
        (b"x-kvplane-decode", decode.encode("latin-1", "replace")),
    )


@lru_cache(1024)
def _known(knowledge: Knowledge, reason: str) -> tuple[Header, ...]:
    state = b"x-kvplane-knowledge", knowledge.encode()
    if knowledge is Knowledge.EXACT:
        return (state,)
    return state, (b"x-kvplane-reason", _one_line(reason).encode("latin-1", "replace"))


@lru_cache(256)
def _silent(*makers: str) -> tuple[tuple[str, ...], bool]:
    """Those that tell no stages, each once; and does any tell them?"""
    silent = tuple([one for one in dict.fromkeys(makers) if one not in TELLING])
    return silent, any(one in TELLING for one in makers)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]

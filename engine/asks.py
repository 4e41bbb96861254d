"""Asks: what is to be computed, past the door.

Pure: nouns. body.py makes them from foreign JSON, everything below works with them. Open it to let
a request ask for something new.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.vocabulary import Room

from .logprobs import Wanted


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample of one prompt."""

    index: int
    ids: tuple[int, ...]
    max_new: int  # tokens
    prompt: int = 0  # number of its prompt in the body
    sample: int = 0  # number of the sample of that prompt
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    room: Room | None = None
    host: str | None = None  # of the prefill's bootstrap server
    port: int | None = None
    dp_rank: int | None = None  # ours
    prefill_dp_rank: int | None = None
    salt: str = ""
    wanted: Wanted | None = None  # log-probabilities


@dataclass(frozen=True, slots=True)
class Call:
    """One body."""

    route: str  # generate | completions | chat
    rid: str
    asks: tuple[Ask, ...]
    stream: bool = False
    batched: bool = False  # the answer is a list (/generate only)
    usage_at_end: bool = False  # of a stream

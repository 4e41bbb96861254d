"""Pairing: which prefill and which decode meet?

Pure. Two ranked lists in, a pair or the reason why there is none out; gateway.py mints the room
for it. Whether two shapes fit is bootstrap/topology.py's to say and comes as an argument. Open it
to change which pair is taken when several fit.

    prefills p1 p2   decodes d1 d2   p1 fits none, p2 fits d2   ->   Pair(p2, d2)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from kvplane.vocabulary import Shape, Worker

from .errors import GatewayError
from .handoffs import HANDOFFS, Handoff
from .policies.base import Candidate
from .target import Target

Compatible = Callable[[Shape, Shape], Sequence[str]]  # differing fields; empty = they fit


class Pair(msgspec.Struct, frozen=True, gc=False):
    """These two meet."""

    prefill: Candidate
    decode: Candidate


class NoPair(msgspec.Struct, frozen=True):
    """Nobody meets. `code` is one of errors.CODES, `reason` a sentence with the facts."""

    reason: str
    code: str


def pair(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    compatible: Compatible,
    apart: Collection[tuple[Worker, Worker]] = (),
) -> Pair | NoPair:
    """The best prefill that fits any decode, with the best decode it fits. Those that failed
    together too often (`apart`) meet only where no others can."""
    if not prefills:
        return NoPair("no prefill worker can be used", "no_prefill_available")
    if not decodes:
        return NoPair("no decode worker can be used", "no_decode_available")
    last: Pair | None = None
    for prefill in prefills:
        for decode in decodes:
            if not misfit(prefill, decode, compatible):
                if not apart or (prefill.target.worker, decode.target.worker) not in apart:
                    return Pair(prefill, decode)
                last = last or Pair(prefill, decode)
    if last is not None:
        return last
    first, second = prefills[0], decodes[0]
    why = "; ".join(misfit(first, second, compatible))
    names = f"{first.target.worker} and {second.target.worker}"
    return NoPair(f"no prefill fits a decode; {names} differ in {why}", "no_compatible_pair")


def misfit(prefill: Candidate, decode: Candidate, compatible: Compatible) -> tuple[str, ...]:
    """What keeps two workers apart; empty where they fit."""
    one, other = prefill.target, decode.target
    if one.way != other.way:
        return (f"engine: {one.way} against {other.way}",)
    if one.model and other.model and one.model != other.model:
        return (f"model: {one.model} against {other.model}",)
    return tuple(compatible(one.up.shape, other.up.shape))


def handoff(prefill: Target) -> Handoff:
    """Its way of handing over. Raises GatewayError for one nobody knows."""
    try:
        return HANDOFFS[prefill.way]
    except KeyError:
        known = ", ".join(sorted(HANDOFFS))
        why = f"no hand-off for {prefill.way}; known: {known}"
        raise GatewayError("no_compatible_pair", why) from None

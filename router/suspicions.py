"""Suspicions: which precondition of the index is likely broken for a worker?

Pure. closed_loop.py tests each request whose engine found something else than was foretold;
drift.py keeps what would explain it. Open it to test one more precondition.

    salt        right when ranked without the salt, or with one others use
    adapter     right when ranked for the base model, or for another adapter
    identity    right for another worker, or what this one served appears at that one
    block size  right in larger blocks, or no multiple of the blocks that are indexed
    silent      requests must have stored blocks, and no batch came (drift.Stream)

One request proves nothing: verdicts.py names a cause that explains most of those that were wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kvplane.index import View
from kvplane.vocabulary import Namespace, Worker

from .foretold import Foretold

MOST_OTHERS = 4  # salts or adapters tried for one request


class Cause(StrEnum):
    """What may be broken, the likelier first where two explain as much; a closed set for labels."""

    SILENT = "stream silent"
    SALT = "salt"
    ADAPTER = "adapter"
    IDENTITY = "wrong worker identity"
    BLOCK_SIZE = "block size"
    TOKENS = "tokens"  # proven by self_check.py, not suspected here
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One request would be explained by this. Of a mixed-up identity some signs may be chance:
    of those that are not, `proof` is set."""

    cause: Cause
    about: str = ""  # the other worker, adapter, salt or size
    proof: bool = True


@dataclass(frozen=True, slots=True)
class Scene:
    """What a request may be explained by, beside its own facts."""

    view: View
    later: Mapping[Worker, int]  # Foretold.now() a moment after it was served
    adapters: Collection[str] = ()  # that its worker serves
    salts: Collection[str] = ()  # seen lately
    declared: int | None = None  # the block size the worker is said to have


def explain(told: Foretold, actual: int, scene: Scene) -> frozenset[Suspicion]:
    """Everything that would explain what the engine found; of a request that was foretold right
    only a mixed-up identity can be learnt."""
    low, high = sorted((told.predicted, scene.later.get(told.worker, 0)))
    found = set(_identity(told, actual, scene))
    if actual > high:
        found.update(_spaces(told, actual, scene))
    if not low <= actual <= high:
        found.update(_sizes(told, actual, low, scene))
    return frozenset(found)


def _spaces(told: Foretold, actual: int, scene: Scene) -> Iterable[Suspicion]:
    """The index has what the engine found, but under another salt or adapter."""
    salts = [""] if told.space.salt else [salt for salt in scene.salts if salt]
    names = ["", *scene.adapters] if told.space.adapter else [*scene.adapters]
    others = [name for name in names if name != told.space.adapter]
    tries: list[tuple[Suspicion, Namespace]] = []
    for salt in salts[:MOST_OTHERS]:
        about = "a salt of other requests" if salt else "no salt"
        tries.append((Suspicion(Cause.SALT, about), replace(told.space, salt=salt)))
    for name in others[:MOST_OTHERS]:
        about = f"adapter {name}" if name else "the base model"
        tries.append((Suspicion(Cause.ADAPTER, about), replace(told.space, adapter=name)))
    for suspicion, space in tries:
        if told.now(scene.view, space).get(told.worker, 0) >= actual:
            yield suspicion


def _sizes(told: Foretold, actual: int, low: int, scene: Scene) -> Iterable[Suspicion]:
    """Does the engine share in other blocks than those that are indexed?"""
    size = told.space.block_size
    if actual % size:
        yield Suspicion(Cause.BLOCK_SIZE, "another size")
    elif actual and len(told.prompts) == 1:
        doubled = (size * 2, size * 4, size * 8)
        for other in {*scene.view.block_sizes(), scene.declared or 0, *doubled}:
            if other > size and low // other * other == actual:
                yield Suspicion(Cause.BLOCK_SIZE, f"{other} tokens")


def _identity(told: Foretold, actual: int, scene: Scene) -> Iterable[Suspicion]:
    """Are another worker's events taken for this one's?"""
    mine = scene.later.get(told.worker, 0)
    for other in {*scene.later, *told.depths} - {told.worker}:
        asked, later = told.depths.get(other), scene.later.get(other, 0)
        before = asked.predicted if asked else later
        over, under = actual < min(told.predicted, mine), actual > max(told.predicted, mine)
        if under and before == actual:
            yield Suspicion(Cause.IDENTITY, str(other), proof=False)
        if over and before == told.predicted:
            yield Suspicion(Cause.IDENTITY, str(other), proof=False)
            if _twins(scene.view, told.worker, other):
                yield Suspicion(Cause.IDENTITY, str(other))
        if asked is not None and before < told.most <= later and actual < told.most:
            # Served here, stored there; chance where that one served the same prompt meanwhile.
            yield Suspicion(Cause.IDENTITY, str(other), proof=mine < told.most)


def _twins(view: View, one: Worker, other: Worker) -> bool:
    """Is what we know of two workers the same stream, told twice?"""
    a, b = view.facts(one), view.facts(other)
    if a is None or b is None or a.last is None or not any(a.counts):
        return False
    return (a.last, a.counts, a.block_size) == (b.last, b.counts, b.block_size)

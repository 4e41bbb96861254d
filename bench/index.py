"""Index: events into the view, and prompts out of it, beside Dynamo's RadixTree.

`changes` is what events/ hands over; `msgpack` are bytes of the stream, decoded inside, because the
peer parses JSON inside. Fresh processes on one core take turns. The peer is there when DYNAMO_PY
names an environment with ai-dynamo-runtime; `x` is its figure over ours: above 1 we need less.
CPU is the figure to compare: on a busy machine wall is what the others left.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from bench.index_process import SIZE
from bench.index_runs import PEER, Found, take_turns
from bench.timing import Absent, Row
from bench.workload import SHARES, Spec

SPECS = (Spec(64, 512), Spec(64, 64), Spec(8, 4096))  # pods, blocks of a prompt; 200 k resident
ENGINES = ("changes", "msgpack")
QUERIES, ROUNDS = 600, 7  # neighbours take a third of a core now and then

Pick = Callable[[dict[str, Any]], float]


def rows(
    specs: Sequence[Spec] = SPECS, queries: int = QUERIES, rounds: int = ROUNDS
) -> Iterator[Row | Absent]:
    """Microseconds of a block that is told, and of a question."""
    for spec in specs:
        found, absent = take_turns("speed", spec, ENGINES, rounds, queries)
        for engine in ENGINES:
            for what in ("CPU", "wall"):
                name = f"apply, {named(spec)}, {engine}"
                yield row(name, f"us {what}", found, engine, _told(f"{what.lower()}_us"))
        for share, what in ((None, "wall"), *((share, "CPU") for share in (None, *SHARES))):
            part = "" if share is None else f", {share:.0%} held"
            for percent in (50, 99):
                name = f"query, {named(spec)}{part}, p{percent}"
                yield row(name, f"us {what}", found, "changes", _asked(what, share, percent))
        if absent:
            yield absent


def named(spec: Spec) -> str:
    """64 x 8 k: pods and tokens of a prompt."""
    tokens = spec.prompt * SIZE
    size = f"{tokens // 1024} k" if tokens % 1024 == 0 else f"{tokens}"
    return f"{spec.pods} x {size}"


def row(name: str, unit: str, found: Found, engine: str, pick: Pick) -> Row:
    """Ours of every round, and the peer's beside it."""
    ours, peers = (tuple(map(pick, found.get(who, []))) for who in (engine, PEER))
    return Row(name, unit, ours, peers)


def _told(key: str) -> Pick:
    return lambda one: float(one[key])


def _asked(what: str, share: float | None, percent: int) -> Pick:
    def pick(one: dict[str, Any]) -> float:
        queries = one["queries"][what]
        times = chain(*queries.values()) if share is None else queries[str(share)]
        return float(statistics.quantiles(times, n=100, method="inclusive")[percent - 1])

    return pick

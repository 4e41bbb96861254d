"""Memory: bytes of resident memory for each block a pod holds, beside Dynamo's RadixTree.

64 pods, prompts of 8 k tokens, and half as much churn as is held. 5 M blocks take two minutes with
the peer and are a name of their own: `python -m bench memory-5m`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.index import named, row
from bench.index_runs import take_turns
from bench.timing import Absent, Row
from bench.workload import Spec

SPEC = Spec(64, 512, 1_000_000)
ROUNDS = 3


def rows(spec: Spec = SPEC, rounds: int = ROUNDS) -> Iterator[Row | Absent]:
    """At 1 M."""
    found, absent = take_turns("memory", spec, ["changes"], rounds)
    name = f"memory, {named(spec)}, {spec.resident:,} held"
    yield row(name, "B/block", found, "changes", lambda one: float(one["bytes"]))
    if absent:
        yield absent


def big() -> Iterator[Row | Absent]:
    """At 5 M, once."""
    yield from rows(replace(SPEC, resident=5_000_000), 1)

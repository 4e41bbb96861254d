"""Index: events into the view, and prompts out of it; 64 pods, conversations that share a stem."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from bench.index_adapter import Index
from bench.timing import Row, latency, rate

PODS = 64
SESSIONS = 400
BLOCKS = 512  # of one prompt: 8 k tokens
STEM = 128  # of them shared by a quarter of the sessions
CHUNK = 64  # blocks of one event


def rows() -> Iterator[Row]:
    """Blocks applied per second; microseconds for one prompt."""
    sessions = _sessions()
    events = [event for number, one in enumerate(sessions) for event in _events(number, one)]
    blocks = sum(len(seq) for _, _, seq in events)
    maker = Index(PODS, 16)
    payloads = [maker.event(pod, True, parent, seq, seq) for pod, parent, seq in events]

    def fill() -> Index:
        index = Index(PODS, 16)
        for payload in payloads:
            index.apply(payload)
        return index

    yield rate(f"index, apply, {PODS} pods x 8 k tokens", "blocks", blocks, fill)
    index = fill()
    asked = [partial(index.find, index.query(one, one)) for one in sessions]
    yield latency(f"index, query of {BLOCKS} blocks, {blocks // 1000} k resident, p50", asked)


def _sessions() -> list[list[int]]:
    chance = random.Random(2)
    stems = [[chance.getrandbits(64) for _ in range(STEM)] for _ in range(4)]
    return [
        stems[number % 4] + [chance.getrandbits(64) for _ in range(BLOCKS - STEM)]
        for number in range(SESSIONS)
    ]


def _events(number: int, session: list[int]) -> Iterator[tuple[int, int | None, list[int]]]:
    for first in range(0, BLOCKS, CHUNK):
        parent = session[first - 1] if first else None
        yield number % PODS, parent, session[first : first + CHUNK]

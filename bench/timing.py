"""Timing: a warm-up, several rounds, the median, and one line for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One result."""

    name: str
    unit: str
    values: tuple[float, ...]  # one per round
    peer: tuple[float, ...] = ()  # the same of a peer; its figure over ours is the ratio

    def line(self) -> str:
        """name, median, unit, least and most; the peer's median and the ratio of the rounds."""
        middle = _shown(statistics.median(self.values))
        rounds = f"({_spread(self.values)}, {len(self.values)} rounds)"
        found = f"{self.name:<44} {middle:>12} {self.unit:<10} {rounds}"
        if not self.peer:
            return found
        ratios = [peer / ours for ours, peer in zip(self.values, self.peer, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} x ({_spread(ratios)})"
        return f"{found}  peer {_shown(statistics.median(self.peer))}, {ratio}"


class Line(Protocol):
    """Whatever has one line to say."""

    def line(self) -> str: ...  # as it is printed


def _spread(values: Sequence[float]) -> str:
    return f"{_shown(min(values))} to {_shown(max(values))}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Absent:
    """No result, and why."""

    name: str
    reason: str

    def line(self) -> str:
        """name, reason."""
        return f"{self.name:<44} not measured: {self.reason}"


def rate(name: str, unit: str, count: int, work: Callable[[], object]) -> Row:
    """`count` things per call of `work`, in things per second."""
    work()
    values = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        values.append(count / (time.perf_counter() - began))
    return Row(name, f"{unit}/s", tuple(values))


def latency(name: str, calls: list[Callable[[], object]]) -> Row:
    """Median time of these calls per round, in microseconds."""
    for call in calls[: len(calls) // 4 + 1]:
        call()
    values = []
    for _ in range(ROUNDS):
        times = []
        for call in calls:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        values.append(statistics.median(times) * 1e6)
    return Row(name, "us", tuple(values))

"""Tallies: counters and histograms that cost next to nothing to move.

Edge of the ground floor: collectors on a registry that is given. A metrics.py names them; others
move them with the words of prometheus_client: labels(...).inc(), labels(...).observe(s); what each
request moves is moved by of[...], which calls nothing. They are moved in one event loop, so that no
lock is taken. Open it to change what a moved counter costs or how it is shown.

    labels("prefill", "p1", "success") -> looked up once by what was given, shown by its text
    of["prefill", "p1", "success"].value += 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MOST_WAITING = 256  # of one histogram; to sort them in takes 50 us

Calls = Sequence[Callable[[], None]]


class Count:
    """One counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """More of it; never less."""
        assert amount >= 0, "a counter only grows"
        self.value += amount


class Spread:
    """One histogram. What is observed waits and is sorted in many at once."""

    __slots__ = ("_bounds", "_counts", "_on_many", "_total", "_waiting", "observe")

    def __init__(self, bounds: Sequence[float], on_many: Calls | None = ()) -> None:
        """`on_many` is called when many wait here; None: somebody else says when to sort in."""
        self._bounds, self._on_many = bounds, () if on_many is None else on_many
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._waiting: list[float] = []
        self.observe: Callable[[float], None] = (  # one more of this size
            self._waiting.append if on_many is None else self._observe
        )

    def _observe(self, value: float) -> None:
        waiting = self._waiting
        waiting.append(value)
        if len(waiting) >= MOST_WAITING:
            self.sort_in()
            for call in self._on_many:
                call()

    def observe_all(self, values: Iterable[float]) -> None:
        """Many at once."""
        self._waiting += values
        self.sort_in()

    @property
    def counts(self) -> list[int]:
        """Of each bucket alone; the last is +Inf."""
        self.sort_in()
        return self._counts

    @property
    def total(self) -> float:
        """Sum of all that was observed."""
        self.sort_in()
        return self._total

    def sort_in(self) -> None:
        """A look per bucket instead of one per value."""
        ordered, below = sorted(self._waiting), 0
        self._waiting.clear()
        for at, bound in enumerate(self._bounds):
            upto = bisect_right(ordered, bound)
            self._counts[at] += upto - below
            below = upto
        self._counts[-1] += len(ordered) - below
        self._total += sum(ordered)


One = TypeVar("One", Count, Spread)


class _Given(dict[tuple[object, ...], One]):
    """By the objects that were given as labels; a subscript calls nothing but for a first use."""

    def __init__(self, make: Callable[[tuple[object, ...]], One]) -> None:
        super().__init__()
        self._make: Callable[[tuple[object, ...]], One] = make

    def __missing__(self, values: tuple[object, ...]) -> One:
        made = self[values] = self._make(values)
        return made


class _Family(Collector, Generic[One]):
    """What has one name, by its labels."""

    def __init__(self, name: str, text: str, names: Sequence[str], make: Callable[[], One]) -> None:
        self._name, self._text, self._names = name, text, tuple(names)
        self._make: Callable[[], One] = make
        self._shown: dict[tuple[str, ...], One] = {}
        self.of: _Given[One] = _Given(self._named)
        self.bare: One | None = self.labels() if not names else None

    def labels(self, *values: object) -> One:
        """The one with these label values; made at first use. An enum and its text are the same."""
        return self.of[values]

    def _named(self, values: tuple[object, ...]) -> One:
        if len(values) != len(self._names):
            raise ValueError(f"{self._name}: labels {values}: must be {self._names}")
        text = tuple(map(str, values))
        found = self._shown.get(text)
        if found is None:
            found = self._shown[text] = self._make()
        return found

    def describe(self) -> list[Metric]:
        """Its name, so that a registry refuses a second of it."""
        return list(self.collect())


class Counts(_Family[Count]):
    """A counter by labels."""

    def __init__(self, name: str, text: str, names: Sequence[str] = ()) -> None:
        super().__init__(name, text, names, Count)

    def inc(self, amount: float = 1) -> None:
        """Of a counter without labels."""
        assert self.bare is not None, f"{self._name} has labels"
        self.bare.inc(amount)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._names)
        for values, count in self._shown.items():
            family.add_metric(values, count.value)
        yield family


class Spreads(_Family[Spread]):
    """A histogram by labels."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        names: Sequence[str] = (),
        along: Spreads | None = None,
    ) -> None:
        """`along`: one that is observed about as often. When many wait there, these are sorted in
        too, and to observe one of them calls nothing."""
        self._texts = [*map(floatToGoString, bounds), "+Inf"]
        self.on_show: list[Callable[[], None]] = []  # called before it is read
        self.on_many: list[Callable[[], None]] = []  # called when many were observed
        if along is not None:
            along.on_many.append(self._sort_in)
        then = self.on_many if along is None else None
        super().__init__(name, text, names, lambda: Spread(tuple(bounds), then))
        bare = self.bare
        self.observe: Callable[[float], None] = bare.observe if bare else self._labelled

    def _sort_in(self) -> None:
        for spread in self._shown.values():
            spread.sort_in()

    def _labelled(self, _: float) -> None:
        raise AssertionError(f"{self._name} has labels")

    def collect(self) -> Iterator[Metric]:
        for count in self.on_show:
            count()
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        for values, spread in self._shown.items():
            below = accumulate(map(float, spread.counts))
            buckets = list(zip(self._texts, below, strict=True))
            family.add_metric(values, buckets, sum_value=spread.total)
        yield family


def counts(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counts:
    """A counter on this registry."""
    made = Counts(name, text, labels)
    registry.register(made)
    return made


def spreads(
    registry: CollectorRegistry,
    name: str,
    text: str,
    bounds: Sequence[float],
    *labels: str,
    along: Spreads | None = None,
) -> Spreads:
    """A histogram on this registry."""
    made = Spreads(name, text, bounds, labels, along)
    registry.register(made)
    return made

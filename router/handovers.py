"""Handovers: which requests were handed over, and which only seemed to be?

Edge: counts each ended attempt, and looks at a decode's counters once in a while where its answers
cannot tell. sending.py reports here; recomputed.py judges. Open it to change how often engines are
looked at, or what is said. Nothing here is on the path of a request.

    answer ended -> prefill gave nothing?  cached tokens say no?  -> counted, said
                 \\-> neither tells -> /metrics of the decode, at most each LOOK_S -> the same
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .errands import Errands
from .recomputed import ALARM, COUNTED, Counters, Streaks, computed_again, counters
from .target import Target

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two looks at one decode's metrics, and only while it is used
MOST_LOOKED = 4096  # decodes remembered


@dataclass(slots=True)
class _Look:
    """What is known of one decode's counters."""

    next_at: float = 0.0
    before: Counters | None = None
    requests: int = 0  # handed over since
    tokens: int = 0


class Handovers:
    """Counts and alarms."""

    def __init__(
        self,
        errands: Errands,
        registry: CollectorRegistry,
        lost: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._errands, self._lost, self._now = errands, lost, now
        self._streaks, self._looks = Streaks(), dict[str, _Look]()
        self._aborts = Counter(
            "kvplane_router_aborts_total",
            "Legs given up while their engine was at work, by how the engine was told.",
            ["side", "outcome"],  # told | refused | unheard | closed | dropped
            registry=registry,
        )
        self._clean_ups = Counter(
            "kvplane_router_clean_ups_total",
            "Blocks kept at a prefill for a decode that never came, by what became of them.",
            ["outcome"],  # fetched | refused | unheard | no decode | dropped
            registry=registry,
        )
        registry.register(_Alarms(self._streaks))

    def aborted(self, side: str, outcome: str) -> None:
        """A leg was given up."""
        self._aborts.labels(side, outcome).inc()

    def cleaned(self, outcome: str) -> None:
        """Somebody, or nobody, fetched what nobody needs."""
        self._clean_ups.labels(outcome).inc()

    def ended(self, prefill: Target, decode: Target, why: str, proven: bool, tokens: int) -> None:
        """An answer left whole. `why` decode computed the prompt itself, "" where nothing says so;
        `proven` where something says it did not."""
        if why or proven:
            self._book(prefill, decode, why)
        else:
            self._look(prefill, decode, tokens)

    def _book(self, prefill: Target, decode: Target, why: str, times: int = 1) -> None:
        for _ in range(times if why else 0):
            self._lost(why)
        pair = (str(prefill.worker), str(decode.worker))
        if self._streaks.book(pair, bool(why), times):
            log.warning(
                "not disaggregated prefill=%s decode=%s in_a_row>=%d why=%s action=serve on",
                *pair, ALARM, why,
            )  # fmt: skip

    def _look(self, prefill: Target, decode: Target, tokens: int) -> None:
        if len(self._looks) >= MOST_LOOKED:
            self._looks.clear()
        look = self._looks.setdefault(decode.url, _Look())
        look.requests, look.tokens = look.requests + 1, look.tokens + tokens
        if self._now() < look.next_at:
            return
        look.next_at = self._now() + LOOK_S
        requests, tokens, look.requests, look.tokens = look.requests, look.tokens, 0, 0

        def seen(status: int, body: bytes) -> None:
            after = counters(body.decode("utf-8", "replace")) if status == 200 else None
            before, look.before = look.before, after
            if before is not None and after is not None and tokens:
                again = computed_again(before, after, tokens)
                self._book(prefill, decode, COUNTED if again else "", requests)

        self._errands.run(decode.url, "/metrics", method="GET", then=seen)


class _Alarms(Collector):
    """Pairs whose decode computes what its prefill computed; read when somebody scrapes."""

    def __init__(self, streaks: Streaks) -> None:
        self._streaks = streaks

    def describe(self) -> list[Any]:
        """Nothing: the registry need not scrape us to know our names."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """How many in a row, once it is an alarm."""
        name = "kvplane_router_not_disaggregated_in_a_row"
        text = "Requests in a row whose decode computed the prompt itself; from 5 on."
        found = GaugeMetricFamily(name, text, labels=["prefill", "decode"])
        for (prefill, decode), row in self._streaks.alarms().items():
            found.add_metric([prefill, decode], row)
        yield found

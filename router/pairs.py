"""Pairs: two workers failed together, and nobody can tell whose fault it was. Yet.

Pure: time is an argument. journey.py books here what blame.py calls shared: a transfer that failed
without saying where, two engines that were silent together. Who fails with several partners is
guilty; two that fail only with each other are kept apart, and no circuit opens for it. Open it to
change when a suspicion becomes a verdict.

    p1+d1 failed                 nobody yet; another attempt goes without both
    p1+d1 failed, p1+d2 failed   p1
    p1+d1, three times in a row  p1 meets d2, d1 meets p2, where there are others: it shows
"""

from __future__ import annotations

from collections import deque

from kvplane.vocabulary import Pod, Worker

from .settings import BreakerSettings

Met = tuple[Worker, Worker]  # prefill, decode
NONE: frozenset[Met] = frozenset()


class Pairs:
    """What failed together lately; empty while all is well."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self.faults: dict[Met, deque[float]] = {}  # when, in a row

    def failed(self, prefill: Worker, decode: Worker, now: float) -> tuple[Worker, ...]:
        """Book a fault of both. Returns the workers it can be laid on; nobody while only these two
        failed, and only with each other."""
        self._drop_old(now)
        times = self.faults.setdefault((prefill, decode), deque(maxlen=self._settings.pair_faults))
        times.append(now)
        of_prefill, of_decode = self._partners(prefill, decode)
        if of_prefill > of_decode:
            return (prefill,)
        if of_decode > of_prefill:
            return (decode,)
        return (prefill, decode) if of_prefill > 1 else ()

    def succeeded(self, prefill: Worker, decode: Worker) -> None:
        """They met: nothing stands between them."""
        if self.faults:
            self.faults.pop((prefill, decode), None)

    def apart(self, now: float) -> frozenset[Met]:
        """Those that should not meet now, where others can. Whoever failed with several is known to
        be guilty: its circuit is what keeps requests away."""
        if not self.faults:
            return NONE
        many, since = self._settings.pair_faults, now - self._settings.pause_s
        often = [m for m, times in self.faults.items() if len(times) >= many and times[-1] > since]
        return frozenset(met for met in often if self._partners(*met) == (1, 1))

    def forget(self, pod: Pod) -> None:
        """A pod left, or began a new life."""
        left = {met: t for met, t in self.faults.items() if pod not in (met[0].pod, met[1].pod)}
        self.faults = left

    def _partners(self, prefill: Worker, decode: Worker) -> tuple[int, int]:
        """With how many each of the two failed."""
        of_prefill = sum(one == prefill for one, _ in self.faults)
        return of_prefill, sum(other == decode for _, other in self.faults)

    def _drop_old(self, now: float) -> None:
        since = now - self._settings.window_s
        self.faults = {met: times for met, times in self.faults.items() if times[-1] > since}

"""Recomputed: does a decode fetch what its prefill computed, or compute it again?

Pure. An engine that lacks its connector, or was given nothing to fetch, answers 200 all the same:
only its counters and its cached tokens tell. handovers.py feeds it. Open it to change what counts
as proof, or how many in a row are an alarm. Source: vllm.md section 5.

    vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}   stands still
                                      {source="local_compute"}          grows by the prompts
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ALARM = 5  # in a row: one may be a prompt shorter than a block
COUNTED = "decode computed the prompt itself"  # as its counters or its cached tokens tell
MOST_PAIRS = 4096  # remembered
COUNTER = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*\bsource="([a-z_]+)"[^}]*\} ([0-9.e+]+)', re.M
)


@dataclass(frozen=True, slots=True)
class Counters:
    """Prompt tokens of a decode since it started."""

    fetched: float
    computed: float


def counters(page: str) -> Counters | None:
    """Of an engine's metrics, over all its ranks; None where it does not tell."""
    found: dict[str, float] = {}
    for source, value in COUNTER.findall(page):
        found[source] = found.get(source, 0.0) + float(value)
    if "local_compute" not in found and "external_kv_transfer" not in found:
        return None
    return Counters(found.get("external_kv_transfer", 0.0), found.get("local_compute", 0.0))


def computed_again(before: Counters, after: Counters, tokens: int) -> bool:
    """Between two looks prompts of this many tokens were handed over. A decode that held them
    already fetches nothing, but computes nothing either."""
    grown = after.computed - before.computed
    return after.fetched == before.fetched and grown >= max(1, tokens) / 2


class Streaks:
    """How often in a row each pair's decode computed the prompt itself."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = {}

    def book(self, pair: tuple[str, str], again: bool, times: int = 1) -> bool:
        """True where an alarm begins."""
        before = self._rows.pop(pair, 0)
        if not again:
            return False
        if len(self._rows) >= MOST_PAIRS:
            self._rows.pop(next(iter(self._rows)))
        self._rows[pair] = before + times
        return before < ALARM <= before + times

    def alarms(self) -> dict[tuple[str, str], int]:
        """Pairs over the limit, with how many in a row."""
        return {pair: row for pair, row in self._rows.items() if row >= ALARM}

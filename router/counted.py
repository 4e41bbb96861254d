"""Counted: what is counted of a choice, however the attempt ends.

Edge: moves counters. gateway.py asks with each choice. Choices of one pair whose tokens are not
known are one object (choice.py): what counts them is looked up once. Open it to count one more
thing of a choice.
"""

from __future__ import annotations

from kvplane.tallies import Count

from .chosen import Choice
from .doubts import Doubts
from .metrics import RouterMetrics
from .plans import Prompt

MOST_KEPT = 1024  # choices that many requests share


class Counted(dict[Choice, Count]):
    """Counters of those that were counted once: all there is to move for such a choice."""

    def __init__(self, metrics: RouterMetrics, doubts: Doubts) -> None:
        super().__init__()
        self._metrics, self._doubts = metrics, doubts

    def of(self, choice: Choice, prompt: Prompt, again: bool) -> Count:
        """Of one that is not among them yet; all else is counted here. `again`: it is no first
        attempt."""
        metrics = self._metrics
        known = metrics.knowledge.of[choice.knowledge, self._doubts.why(choice, prompt)]
        if not again:
            model = (choice.prefill or choice.decode).model
            metrics.prompt_tokens.of[model,].value += choice.prompt_tokens
        if choice.prefill is None:
            metrics.undisaggregated.labels(choice.alone or "unified worker").inc()
        elif prompt.tokens is None and not again:  # of no tokens nothing else is counted
            if len(self) >= MOST_KEPT:
                self.clear()
            self[choice] = known
        return known

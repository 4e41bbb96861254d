"""Verdicts: what our own check says of a worker: one sentence, one culprit, one next step.

Pure. closed_loop.py asks after each change; choice.py believes the worker no further, diagnosis.py
and metrics.py show it. Open it to change when a cause is named, or its words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvplane.vocabulary import Knowledge, Worker

from .drift import Compared
from .suspicions import Cause, Suspicion

SHARE = 2 / 3  # of the wrong requests a cause must explain
LEAST = 2  # requests it must explain at all
ALIKE = (Cause.SALT, Cause.ADAPTER)  # explain only what the index did not claim


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a worker is believed no further than `state`."""

    cause: Cause
    about: str
    state: Knowledge
    sentence: str
    culprit: str
    next_step: str

    @property
    def named(self) -> tuple[Cause, str]:
        """What makes it another verdict than the one before; the rest are its figures."""
        return self.cause, self.about

    @property
    def proven(self) -> bool:
        """It names a precondition that was tested: late news alone does not look like it."""
        return self.cause not in (Cause.UNKNOWN, Cause.SILENT)


def likeliest(wrong: Sequence[Compared], window: Iterable[Compared]) -> Suspicion:
    """The cause that explains most of the wrong requests; of those that explain as many, the
    first of Cause. A mixed-up identity must also have been proven within the window."""
    votes: Counter[tuple[Cause, str]] = Counter()
    for one in wrong:
        votes.update({(each.cause, each.about) for each in one.suspicions})
    proven = {(each.cause, each.about) for one in window for each in one.suspicions if each.proof}
    under = sum(one.under > 0 for one in wrong)

    def enough(named: tuple[Cause, str]) -> bool:
        could = under if named[0] in ALIKE else len(wrong)
        return named in proven and votes[named] >= max(LEAST, SHARE * could)

    order = list(Cause)
    found = sorted(filter(enough, votes), key=lambda one: (-votes[one], order.index(one[0]), one))
    return Suspicion(*found[0]) if found else Suspicion(Cause.UNKNOWN)


def drifted(worker: Worker, wrong: Sequence[Compared], window: Sequence[Compared]) -> Verdict:
    """The verdict on a worker whose window is alarmed; the newest wrong request is the example."""
    named = likeliest(wrong, window)
    last = wrong[-1] if wrong else Compared(0.0, 0, 0)
    seen = f"index says {last.predicted} tokens, {worker} found {last.actual}"
    why, culprit, step = _WORDS[named.cause]
    words = {"worker": worker, "about": named.about}
    return Verdict(
        named.cause,
        named.about,
        Knowledge.PARTIAL,
        f"{named.cause}: {seen}; {why.format(**words)}",
        culprit.format(**words),
        step.format(**words),
    )


def silent(worker: Worker, requests: int, silent_s: float) -> Verdict:
    """The verdict on a worker that works and says nothing."""
    why, culprit, step = _WORDS[Cause.SILENT]
    words = {"worker": worker, "requests": requests, "silent_s": f"{silent_s:.0f}"}
    return Verdict(
        Cause.SILENT,
        "",
        Knowledge.DARK,
        f"{Cause.SILENT}: {why.format(**words)}",
        culprit.format(**words),
        step.format(**words),
    )


_WORDS = {  # cause -> why, culprit, next step
    Cause.SILENT: (
        "{worker} served {requests} requests that must have stored blocks and no event of them "
        "came for {silent_s} s",
        "event stream of {worker}",
        "see that its KV events are switched on and that ingest reaches the port they are sent to",
    ),
    Cause.SALT: (
        "right when ranked with {about}: its events do not keep salts apart as its cache does",
        "cache salt at {worker}",
        "see that the engine's release puts the salt of a request into its events, and the gateway "
        "is told the same salt",
    ),
    Cause.ADAPTER: (
        "right when ranked for {about}: adapters are not told apart as its cache does",
        "adapter names of {worker}",
        "see that the adapter has the same name in requests, in the engine and in its events",
    ),
    Cause.IDENTITY: (
        "what {worker} serves is taken for, or told by, {about}",
        "event endpoint of {worker}",
        "compare the event endpoints of {worker} and {about}: each must name its own publisher",
    ),
    Cause.BLOCK_SIZE: (
        "right in blocks of {about}",
        "block size of {worker}",
        "compare the block size the engine shares by with GET /index/workers, and --block-size",
    ),
    Cause.TOKENS: (
        "the gateway makes other tokens of a prompt than {worker} does",
        "tokenizer of {worker} at the gateway",
        "give the gateway the tokenizer folder and chat template this engine was started with",
    ),
    Cause.UNKNOWN: (
        "no tested precondition explains it",
        "{worker}",
        "compare GET /index/rank for such a prompt with the engine's own cached tokens; look for "
        "evictions between choice and prefill",
    ),
}

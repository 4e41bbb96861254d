"""Steps: who leaves a path of runs, and in which tier does what was walked lie?

Pure. A query walks from run to run (forest.py); here is what one run says of those who do not hold
all of it, and what the path says afterwards. Open it to change how a depth is counted.

    run b3..b8, asked b3..b8     A holds it whole: goes on     B holds b3 b4: ends at depth 5
"""

from __future__ import annotations

from collections.abc import Sequence

from .runs import TIERS, Run, ones

Step = tuple[Run, int, int]  # run, first position asked, how many


def settle(
    found: list[tuple[int, int]], run: Run, left: int, first: int, count: int, at: int
) -> int:
    """Settle those that do not hold a whole run in one tier; returns those that go on.

    `found` gets (bitmap of ordinals, depth) of those that end here, `at` blocks deep before it.
    """
    held: dict[int, int] = {}
    for slot, bits in run.partial.items():
        if left >> (slot >> 2) & 1:
            held[slot >> 2] = held.get(slot >> 2, 0) | bits
    stay = 0
    for ordinal, bits in held.items():
        depth = ones(bits >> first)
        if depth >= count:
            stay |= 1 << ordinal
        else:
            found.append((1 << ordinal, at + depth))
        left ^= 1 << ordinal
    if left:
        found.append((left, at))
    return stay


def tiers(path: Sequence[Step], ordinal: int, depth: int) -> list[int]:
    """How many of the first `depth` blocks of a path lie best in each tier."""
    best, at = [0] * TIERS, 0
    for run, first, count in path:
        window = (1 << min(count, depth - at)) - 1
        for tier in range(TIERS):
            mine = run.bits(ordinal << 2 | tier) >> first & window
            best[tier] += mine.bit_count()
            window &= ~mine
        at += count
        if at >= depth:
            break
    return best

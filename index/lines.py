"""Lines: the answer of POST /rank, most of which was written before.

Pure: view, roster and chains in, JSON out; answers.py says the facts, desk.py sends it. What is
said of a worker beside its depth hardly ever changes, so it is kept as bytes, and looked through
with each question for what changed. Open it to add a member to a worker's line.

    {"worker": "a", "url": ..., "epoch": 2, "block_size": 16,     kept until one of them changes
     "blocks": 512, "depth_blocks": 128, ..., "tiers": {...},     shared by all of one depth
     "knowledge": "exact", "reason": "live"}                      kept until somebody tells else
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from kvplane.vocabulary import PrefixChain, Tier, Worker

from . import answers
from .ranking import reached, tiers
from .roster import Roster
from .view import View

_Line = tuple[bytes, int, bytes]  # before the depth, block size or 0, after it
_Chains = Mapping[int, PrefixChain]

_encode = msgspec.json.Encoder().encode


class Lines:
    """What was written of the workers of one view."""

    def __init__(
        self, view: View, doubts: Callable[[], answers.Doubts] = dict[Worker, Any]
    ) -> None:
        self._view, self._doubts = view, doubts
        self._lines: dict[Worker, _Line] = {}
        self._rows: list[_Line] = []  # the same, in everybody's order
        self._of: tuple[object, ...] = ()  # what all of them are true for
        self._turn = -1  # of the view, when it was looked through
        self._told: list[object] = []  # what each of them is true for

    def ranking(
        self, seen: Roster, chains: _Chains, workers: Sequence[Worker] | None, away_s: float
    ) -> dict[str, Any]:
        """The answer of POST /rank, cursor and lag excepted; the best worker's chain names it."""
        view, everybody = self._view, seen.everybody(self._view)
        self._look(seen, everybody, away_s)
        depths = reached(view, chains, workers)
        listed = everybody if workers is None else sorted(workers)
        tokens = list(map(depths.get, listed, repeat(0)))
        order = sorted(range(len(listed)), key=tokens.__getitem__, reverse=True)  # ties as they are
        size = (view.block_size(listed[order[0]]) if depths else None) or min(chains)
        rows = self._rows if workers is None else [self._lines[worker] for worker in listed]
        below, parts, last = tiers(view, chains, depths), list[bytes](), (-1, -1)
        for at in order:
            head, mine, tail = rows[at]
            if below and listed[at] in below:
                middle, last = _middle(mine, tokens[at], below[listed[at]], chains), (-1, -1)
            elif last != (mine, tokens[at]):  # mostly the same as the one before
                last = mine, tokens[at]
                middle = _middle(*last, {Tier.GPU: last[1] // mine} if last[1] else {}, chains)
            parts += (head, middle, tail)
        return {
            "namespace": chains[size].namespace.text(),
            "block_size": size,
            "blocks": len(chains[size].blocks),
            "workers": msgspec.Raw(b"[%b]" % b"".join(parts)[:-1]),
        }

    def _look(self, seen: Roster, everybody: Sequence[Worker], away_s: float) -> None:
        """Write anew what is no longer true."""
        view, doubts = self._view, self._doubts()
        of = (seen, everybody, view.living, view.cut_off, away_s > 1, round(away_s), doubts)
        if of == self._of and view.turn == self._turn:
            return
        self._turn = view.turn
        # All that a line depends on and that changes for one worker alone.
        told: list[object] = [
            facts and (facts.epoch, facts.block_size, *facts.known.values())
            for facts in map(view.facts, everybody)
        ]
        if of != self._of:
            self._of, self._told, self._lines, self._rows = of, [()] * len(told), {}, []
        if told != self._told:
            for worker, now, before in zip(everybody, told, self._told, strict=True):
                if now != before:
                    self._lines[worker] = self._line(seen.fleet, worker, away_s, doubts)
            self._told = told
            self._rows = [self._lines[worker] for worker in everybody]

    def _line(
        self, fleet: answers.Fleet, worker: Worker, away_s: float, doubts: answers.Doubts
    ) -> _Line:
        view, size = self._view, answers.block_size(self._view, fleet, worker)
        state, reason = answers.trust(view, fleet, worker, away_s, doubts)
        head = {**answers.who(fleet, worker), "epoch": view.epoch(worker), "block_size": size}
        odd = answers.odd_size(view, fleet, worker)
        tail = {"knowledge": state, "reason": reason, **odd}
        return _encode(head)[:-1] + b",", size or 0, b"," + _encode(tail)[1:] + b","


def _middle(size: int, tokens: int, lies: Mapping[Tier, int], chains: _Chains) -> bytes:
    depth = {
        "blocks": len(chains[size].blocks) if size in chains else 0,
        "depth_blocks": tokens // size if tokens else 0,
        "depth_tokens": tokens,
        "tiers": answers.shown_tiers(lies),
    }
    return _encode(depth)[1:-1]

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
from functools import lru_cache
from itertools import repeat
from typing import Any

import msgspec

from kvplane.vocabulary import Namespace, PrefixChain, Tier, Worker

from . import answers
from .bundles import Bundles, Group, Line
from .ranking import reached, tiers
from .roster import Roster
from .view import View

_Chains = Mapping[int, PrefixChain]

_encode = msgspec.json.Encoder().encode
_ANSWER = b'{"namespace":%b,"block_size":%d,"blocks":%d,%b"workers":[%b]}'


class Lines:
    """What was written of the workers of one view."""

    def __init__(
        self, view: View, doubts: Callable[[], answers.Doubts] = dict[Worker, Any]
    ) -> None:
        self._view, self._doubts = view, doubts
        self._lines: dict[Worker, Line] = {}
        self._even = 0  # the block size of all; 0 where some have another, or none
        self._bundles = Bundles(self._lines, ())
        self._of: tuple[object, ...] = ()  # what all of them are true for
        self._everybody: tuple[Worker, ...] = ()  # then
        self._space: Namespace | None = None  # as it was written last
        self._text = b""
        self._turn = -1  # of the view, when it was looked through
        self._told: list[object] = []  # what each of them is true for

    def ranking(
        self,
        seen: Roster,
        chains: _Chains,
        workers: Sequence[Worker] | None,
        away_s: float,
        place: bytes = b"",
    ) -> bytes:
        """The answer of POST /rank as JSON; the best worker's chain names it. `place`: members that
        say where it is true, each with its comma."""
        self._look(seen, away_s)
        if workers is None and self._even in chains and self._view.plain:
            size, parts = self._many(chains)
        else:
            size, parts = self._each(
                self._everybody if workers is None else sorted(workers), chains, workers
            )
        chain, told = chains[size], b"".join(parts)[:-1]
        if chain.namespace is not self._space:
            self._space, self._text = chain.namespace, _text(chain.namespace)
        return _ANSWER % (self._text, size, len(chain.blocks), place, told)

    def _many(self, chains: _Chains) -> tuple[int, list[bytes]]:
        """Of everybody, where all are of one block size and in GPU memory."""
        size, bundles = self._even, self._bundles
        blocks = chains[size].blocks
        by_depth: dict[int, list[Group]] = {}
        groups, parts, many = list[Group](), list[bytes](), len(blocks)
        for group, depth in self._view.together(blocks):
            by_depth.setdefault(depth, []).append(group)
            groups.append(group)
        for depth in sorted(by_depth, reverse=True):
            said = _IN_GPU % (many, depth, depth * size, depth)
            parts.append(bundles.write(by_depth[depth], said))
        if others := bundles.rest(groups):
            parts.append(bundles.write([others], _IN_GPU % (many, 0, 0, 0)))
        return size if groups else min(chains), parts

    def _each(
        self, listed: Sequence[Worker], chains: _Chains, workers: Sequence[Worker] | None
    ) -> tuple[int, list[bytes]]:
        """One after the other, deepest first."""
        view = self._view
        depths = reached(view, chains, workers)
        tokens = list(map(depths.get, listed, repeat(0)))
        order = sorted(range(len(listed)), key=tokens.__getitem__, reverse=True)  # ties as they are
        size = (view.block_size(listed[order[0]]) if depths else None) or min(chains)
        below, parts, last = tiers(view, chains, depths), list[bytes](), (-1, -1)
        for at in order:
            head, mine, tail = self._lines[listed[at]]
            if below and listed[at] in below:
                middle, last = _middle(mine, tokens[at], below[listed[at]], chains), (-1, -1)
            elif last != (mine, tokens[at]):  # mostly the same as the one before
                last = mine, tokens[at]
                middle = _middle(*last, None, chains)
            parts += (head, middle, tail)
        return size, parts

    def _look(self, seen: Roster, away_s: float) -> None:
        """Write anew what is no longer true."""
        view, doubts = self._view, self._doubts()
        of = (seen, view.living, view.cut_off, away_s > 1, round(away_s), doubts)
        if of == self._of and view.turn == self._turn:
            return
        everybody, self._turn = seen.everybody(view), view.turn
        # All that a line depends on and that changes for one worker alone.
        told: list[object] = [
            facts and (facts.epoch, facts.block_size, *facts.known.values())
            for facts in map(view.facts, everybody)
        ]
        if of != self._of or everybody != self._everybody:
            self._of, self._everybody = of, everybody
            self._told, self._lines = [()] * len(told), {}
            self._even, self._bundles = 0, Bundles(self._lines, everybody)  # also where it is empty
        if told != self._told:
            for worker, now, before in zip(everybody, told, self._told, strict=True):
                if now != before:
                    self._lines[worker] = self._line(seen.fleet, worker, away_s, doubts)
            self._told = told
            sizes = {size for _, size, _ in self._lines.values()}
            self._even = sizes.pop() if len(sizes) == 1 else 0
            self._bundles = Bundles(self._lines, everybody)

    def _line(
        self, fleet: answers.Fleet, worker: Worker, away_s: float, doubts: answers.Doubts
    ) -> Line:
        view, size = self._view, answers.block_size(self._view, fleet, worker)
        state, reason = answers.trust(view, fleet, worker, away_s, doubts)
        head = {**answers.who(fleet, worker), "epoch": view.epoch(worker), "block_size": size}
        odd = answers.odd_size(view, fleet, worker)
        tail = {"knowledge": state, "reason": reason, **odd}
        return _encode(head)[:-1] + b",", size or 0, b"," + _encode(tail)[1:] + b","


@lru_cache(maxsize=256)
def _text(namespace: Namespace) -> bytes:
    return _encode(namespace.text())


def _middle(size: int, tokens: int, lies: Mapping[Tier, int] | None, chains: _Chains) -> bytes:
    """What is said of a depth; None: all of it lies in GPU memory, as most do."""
    blocks = len(chains[size].blocks) if size in chains else 0
    depth = tokens // size if tokens else 0
    if lies is None:
        return _IN_GPU % (blocks, depth, tokens, depth)
    return _depth(blocks, depth, tokens, lies)


def _depth(blocks: int, depth: int, tokens: int, lies: Mapping[Tier, int]) -> bytes:
    told = {
        "blocks": blocks,
        "depth_blocks": depth,
        "depth_tokens": tokens,
        "tiers": answers.shown_tiers(lies),
    }
    return _encode(told)[1:-1]


_IN_GPU = _depth(0, 0, 0, {}).replace(b"0", b"%d", 4)  # the fourth is the first of the tiers

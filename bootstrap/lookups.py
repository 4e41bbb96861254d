"""Lookups: what GET /route is told, worded once per state of the table.

Pure. Between directory.py, which knows, and api.py, which sends. Open it to change the order of
checks, or who gets which members. Texts and member order are those of SGLang 0.5.23; where it
answers 500 to bad input we answer 400 and name the field (its clients look at "not 200" only).

Topology and ranks are asked far more often than they change: answers are kept encoded by the bytes
of the query, until the directory's phase moves.
"""

from __future__ import annotations

from urllib.parse import parse_qsl

from .directory import Cell, Directory, place_text
from .errors import BadInput
from .fields import number
from .registration import NEWER, Facts
from .replies import MISSING_RANKS, Answer, Headers, said, told

PARAMETERS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
MOST_QUERY = 16_384  # bytes
MOST_PARAMETERS = 64  # extras are ignored
MOST_KEPT = 4096  # answers of one phase; of ours some 600 bytes each
KEPT_QUERY = 256  # bytes; engines ask in 80
MOST_NAMED = 5  # missing ranks in a header or a sentence; their number is always told


class Lookups:
    """The answers of one directory."""

    def __init__(self, directory: Directory, most: int = MOST_KEPT) -> None:
        self._directory, self._most = directory, most
        self._phase: tuple[int, bool] | None = None
        self._kept: dict[bytes, Answer] = {}

    def answer(self, query: bytes, now: float) -> Answer:
        """GET /route. Raises BadInput for what can be no question."""
        phase = self._directory.phase(now)
        if phase != self._phase:
            self._kept, self._phase = {}, phase
        found = self._kept.get(query)
        if found is None:
            found = lookup(self._directory, query, now)
            if found.status in (200, 503) and len(query) <= KEPT_QUERY:
                if len(self._kept) >= self._most:
                    self._kept.clear()
                self._kept[query] = found
        return found


def lookup(directory: Directory, query: bytes, now: float) -> Answer:
    """Topology where all four are -1, else one rank.

    Order: presence, numbers up to the first that is not -1, topology or gate, the other numbers.
    """
    given = _given(query)
    if not all(given):
        return said("Missing inputs for bootstrap server.", 400)
    wanted = all(number(name, value) == -1 for name, value in zip(PARAMETERS, given, strict=True))
    if not directory.complete(now):
        count = directory.registered(now)
        text = f"Prefill server not fully registered yet ({count} workers registered)."
        return said(text, 503, headers=missing_header(directory, now))
    if wanted:
        return _topology(directory, now)
    return _rank(directory, given, now)


def _given(query: bytes) -> list[str]:
    """The four parameters; the first of a repeated one counts."""
    if len(query) > MOST_QUERY:
        raise BadInput("query", f"({len(query)} bytes)", f"at most {MOST_QUERY} bytes")
    first: dict[str, str] = {}
    try:
        pairs = parse_qsl(query.decode("latin-1"), True, max_num_fields=MOST_PARAMETERS)
    except ValueError:
        want = f"at most {MOST_PARAMETERS} parameters"
        raise BadInput("query", "(more)", want) from None
    for name, value in pairs:
        first.setdefault(name, value)
    return [first.get(name, "") for name in PARAMETERS]


def _topology(directory: Directory, now: float) -> Answer:
    """Decodes know a closed set of names: who registers without a newer one reads without it."""
    topology = directory.topology(now)
    assert topology is not None, "complete directory without a topology"
    members = topology.answer().items()
    return told({n: v for n, v in members if n not in NEWER or n in directory.sent})


def _rank(directory: Directory, given: list[str], now: float) -> Answer:
    dp, cp, tp, pp = (number(n, v) for n, v in zip(PARAMETERS, given, strict=True))
    entry = directory.rank(dp, cp, tp, pp, now)
    if entry is None:
        names = ("dp_rank", "cp_rank", "tp_rank", "pp_rank")
        place = " ".join(f"{n}={v}" for n, v in zip(names, given, strict=True))
        return said(f"Bootstrap info not found for {place}", 404)
    return told({"rank_ip": entry.raw_ip, "rank_port": entry.address.port})


def missing_header(directory: Directory, now: float) -> Headers:
    """`tp=2, tp=3 and 5 more`; nothing before the first rank tells the sizes."""
    facts, missing = directory.facts, directory.missing(now)
    if facts is None or not missing:
        return ()
    return ((MISSING_RANKS, named(missing, facts)),)


def named(missing: list[Cell], facts: Facts) -> str:
    """The first few by their place, and how many more."""
    shown = ", ".join(place_text(cell, facts) for cell in missing[:MOST_NAMED])
    more = len(missing) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown

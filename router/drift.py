"""Drift: does an engine find in its cache what the index foretold?

Pure: time is an argument. One Window and one Stream per worker; closed_loop.py fills them and acts,
suspicions.py says why. Open it to change what counts as wrong, as an alarm, or as silence.

    foretold 96 when routed, 96 a moment later, engine found  96   right
    foretold  0 when routed, 96 a moment later, engine found  48   right: the news was on its way
    foretold 96 when routed, 96 a moment later, engine found   0   over by 96
    foretold  0 when routed,  0 a moment later, engine found  96   under by 96

    error = tokens wrong / tokens foretold or found, whichever are more, over the window

    alarm      several late ones are wrong, and much of them       over: the last few agree
    rests      nothing wrong for a while                           over: the next wrong one
    mended     the news was late: what was wrong because of it is forgotten
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from .settings import DriftSettings
from .suspicions import Suspicion

MOST_PRINTS = 1024  # prompts told apart while a stream owes batches


class Compared(msgspec.Struct, frozen=True, gc=False):
    """One request: tokens foretold and found. `over`: the index claimed too much; `under`: too
    little. At most one of them is not 0."""

    at: float
    predicted: int
    actual: int
    over: int = 0
    under: int = 0
    suspicions: frozenset[Suspicion] = frozenset()  # what would explain it

    @property
    def right(self) -> bool:
        """Nothing to explain."""
        return not self.over and not self.under

    @property
    def outcome(self) -> str:
        """The label it is counted under."""
        return "over" if self.over else "under" if self.under else "equal"


def compared(predicted: int, later: int, actual: int, at: float) -> Compared:
    """Judge one request by what was foretold when it was routed and `later`, when the news that
    was on its way then has arrived: an engine that found something between the two is right."""
    over = max(0, min(predicted, later) - actual)
    under = max(0, actual - max(predicted, later))
    return Compared(at, predicted, actual, over, under)


def error(these: Iterable[Compared]) -> float:
    """Share of tokens that were foretold wrong; 0 where there is nothing to be wrong about."""
    each = list(these)
    wrong = sum(one.over + one.under for one in each)
    return wrong / max(1, sum(max(one.predicted, one.actual) for one in each))


class Window:
    """The last comparisons of one worker, and whether they are an alarm."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._all: deque[Compared] = deque(maxlen=settings.window)
        self._alarmed = False
        self._news = False  # something was added since the last look
        self._wrong_at: float | None = None  # the last wrong one
        self._rests = False  # nothing wrong came since it was said

    def add(self, one: Compared) -> None:
        """One more. Where neither side speaks of any token, only a suspicion is worth keeping."""
        if one.predicted or one.actual or one.suspicions:
            self._all.append(one)
            self._news = True
            if not one.right:
                self._wrong_at, self._rests = one.at, False

    def uneasy(self, now: float) -> bool:
        """Was anything wrong lately? Then right ones may tell why."""
        return self._wrong_at is not None and now - self._wrong_at < self._settings.window_s

    def recent(self, now: float) -> list[Compared]:
        """Those of the window, oldest first."""
        while self._all and self._all[0].at <= now - self._settings.window_s:
            self._all.popleft()
        return list(self._all)

    def wrong(self, now: float) -> list[Compared]:
        """The late ones that were wrong: what the alarm is about."""
        return [one for one in self._told(now)[-self._settings.late :] if not one.right]

    def errors(self, now: float) -> tuple[float, float]:
        """Of the whole window: tokens claimed too much, and too little, as shares."""
        each = self.recent(now)
        told = max(1, sum(max(one.predicted, one.actual) for one in each))
        return sum(one.over for one in each) / told, sum(one.under for one in each) / told

    def alarmed(self, now: float) -> bool:
        """An alarm begins when several late ones are wrong and much of them is; one miss is none.
        It ends when the last few agree again, and what was before is forgotten then."""
        if not self._news and not self._alarmed:
            return False
        settings, told, self._news = self._settings, self._told(now), False
        if self._alarmed:
            last = told[-settings.agree :]
            if not told or (len(last) == settings.agree and error(last) <= settings.alarm / 2):
                self._alarmed = False
                self._all = deque(last, settings.window)
        elif len(told) >= settings.least:
            late = told[-settings.late :]
            many = sum(not one.right for one in late) >= settings.wrong
            self._alarmed = many and error(late) > settings.alarm
        return self._alarmed

    def mended(self, since: float) -> None:
        """The way of the news was broken and is whole again: what was wrong since then says nothing
        of the index as it is now. With what is left it is judged anew."""
        kept = [one for one in self._all if one.right or one.at < since]
        if len(kept) < len(self._all):
            self._all = deque(kept, self._settings.window)
            self._alarmed, self._news = False, True

    def rests(self, now: float, whole: bool) -> bool:
        """Has nothing wrong come for long enough, seen at a time when news would have come
        (`whole`)? Then until the next wrong one. What is remembered stays."""
        quiet = self._wrong_at is None or now - self._wrong_at >= self._settings.rest_s
        self._rests = self._rests or (whole and quiet)
        return self._rests

    @property
    def resting(self) -> bool:
        """It is an alarm, and rests."""
        return self._alarmed and self._rests

    def _told(self, now: float) -> list[Compared]:
        """Those in which a token was foretold or found: nothing is learnt of the others."""
        return [one for one in self.recent(now) if one.predicted or one.actual]


class Stream:
    """Batches one worker owes us: requests it served that must have stored blocks.

    A request owes a batch later than the last one at the time it was routed. While none comes
    nothing is paid; any batch pays everything.
    """

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._last: int | None = None
        self._prints: set[int] = set()
        self._since: float | None = None  # when it owed enough

    @property
    def owed(self) -> int:
        """Requests whose blocks were never announced."""
        return len(self._prints)

    def served(self, before: int | None, last: int | None, prompt: int, now: float) -> None:
        """A request was served that must store blocks. `before`, `last`: the worker's last batch
        when it was routed, and now. The same prompt again stores nothing new."""
        self.heard(last)
        if before == last and len(self._prints) < MOST_PRINTS:
            self._prints.add(prompt)
            if self._since is None and len(self._prints) >= self._settings.silent_requests:
                self._since = now

    def heard(self, last: int | None) -> None:
        """The number of the last batch, as often as one looks."""
        if last != self._last:
            self.forgive()
            self._last = last

    def forgive(self) -> None:
        """Nothing is owed."""
        self._prints.clear()
        self._since = None

    def silent_s(self, now: float) -> float:
        """How long it has been silent though enough is owed; 0 while that proves nothing."""
        waited = 0.0 if self._since is None else now - self._since
        return waited if waited >= self._settings.silent_s else 0.0

"""Aftermath: what is left to do when the client has its answer.

Edge: background tasks, bounded in number and time. gateway.py hands over each ended attempt;
prefill's answer is read to its end (its cached tokens are booked against what the index foretold),
then both engines are asked what they saw in the rooms, and the meeting is complete: of every
attempt that failed, and of a few a second of the others; of the rest when somebody wants to see it.
Open it to change what is collected. Nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvplane.runtime import cancel
from kvplane.vocabulary import Room, Stage, StageRecord

from .account import Account
from .attempt import Attempt
from .dispatch import finish_prefill, settled
from .evidence import Ledger, stage_records
from .foretold import Foretold
from .legs import Legs
from .legs_errors import LegError
from .legs_exchange import Bell, Exchange
from .legs_wire import Origin
from .meeting import Meeting
from .remembered import Leg
from .target import Target

log = logging.getLogger(__name__)

MOST_TASKS = 256  # attempts in their aftermath; beyond, evidence is dropped and counted
MOST_ROOMS = 16  # rooms of one list that are asked about
MOST_BYTES = 256 * 1024  # of one engine's answer
PREFILL_S = 10.0  # prefill has its answer ready when decode begins; more is a stuck engine
COLLECT_S = 1.0  # over all tries of one room
WAITS_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)  # before each try: stages land just after the legs end
ASKED_A_S = 5.0  # attempts that went well whose engines are asked at once: for the histograms


class Ended(msgspec.Struct, eq=False):
    """One attempt whose answer is out, or which failed, while a task has it."""

    attempt: Attempt
    bell: Bell
    meeting: Meeting
    account: Account  # of prefill's load, which is given back when it ended, always
    foretold: Foretold | None  # to be compared with the cached tokens


class Aftermath:
    """Runs the aftermath of attempts. A Part."""

    def __init__(
        self,
        legs: Legs,
        ledger: Ledger,
        on_cached: Callable[[Meeting, Foretold | None], None] = lambda meeting, foretold: None,
        on_stage: Callable[[StageRecord], None] = lambda record: None,
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._legs, self._ledger = legs, ledger
        self._on_cached, self._on_stage, self._on_dropped = on_cached, on_stage, on_dropped
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[Meeting, asyncio.Task[None]] = {}
        self._sample = Sample(ASKED_A_S)
        ledger.ask = self.ask

    async def start(self) -> None:
        """Nothing to prepare."""

    async def stop(self) -> None:
        """Give up what is under way."""
        await cancel(*self._tasks, *self._asking.values())

    @property
    def pending(self) -> int:
        """Attempts not yet done."""
        return len(self._tasks)

    def begin(
        self,
        attempt: Attempt,
        bell: Bell,
        meeting: Meeting,
        account: Account,
        foretold: Foretold | None,
    ) -> None:
        """Take over; returns at once. Prefill's load is given back on every path."""
        done = attempt.prefill_ended or settled(attempt)
        if done and not (meeting.sides and self._at_once(meeting)):
            meeting.actual_tokens = attempt.usage.cached_tokens()
            if foretold is not None or meeting.predicted_tokens is not None:
                self._on_cached(meeting, foretold)
            _finish(attempt, meeting, account)
            return
        if len(self._tasks) >= MOST_TASKS:
            self._on_dropped()
            attempt.abort()
            _finish(attempt, meeting, account)
            return
        task = asyncio.create_task(self._run(Ended(attempt, bell, meeting, account, foretold)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _at_once(self, meeting: Meeting) -> bool:
        """Are its engines to be asked now?"""
        return meeting.outcome == "failed" or self._sample.take(self._ledger.now)

    async def ask(self, meeting: Meeting) -> None:
        """Ask its engines what they saw, for somebody who wants to see it; once at a time."""
        task = self._asking.get(meeting)
        if task is None:
            task = self._asking[meeting] = asyncio.create_task(self._collect(meeting))
            task.add_done_callback(lambda _: self._asking.pop(meeting, None))
        await asyncio.shield(task)

    async def _run(self, ended: Ended) -> None:
        attempt, meeting, account = ended.attempt, ended.meeting, ended.account
        try:
            await finish_prefill(attempt, ended.bell, PREFILL_S)
            account.release_prefill()
            meeting.actual_tokens = attempt.usage.cached_tokens()
            self._on_cached(meeting, ended.foretold)
            if meeting.sides:
                await self.ask(meeting)
        except Exception:
            log.exception("aftermath failed request=%s action=drop", meeting.request_id)
        finally:
            _finish(attempt, meeting, account)

    async def _collect(self, meeting: Meeting) -> None:
        """Ask until every engine told its stages, for at most COLLECT_S."""
        try:
            async with asyncio.timeout(COLLECT_S):
                for room in meeting.rooms[:MOST_ROOMS]:
                    for wait_s in WAITS_S:
                        await asyncio.sleep(wait_s)
                        for target in meeting.sides:
                            await self._ask(room, target)
                        if self._whole(meeting, room) or meeting.outcome == "open":
                            break
            meeting.collected |= meeting.outcome != "open"
        except TimeoutError:
            log.debug("evidence incomplete request=%s", meeting.request_id)
            meeting.collected |= meeting.outcome != "open"

    def _whole(self, meeting: Meeting, room: Room) -> bool:
        """Nothing more will come: the last stage is there, or the one that failed."""
        records = meeting.stages.get(room, [])
        return any(r.stage is Stage.CONSUME or r.outcome != "ok" for r in records)

    async def _ask(self, room: Room, target: Target) -> None:
        leg = self._legs.begin(Origin.parse(target.url), f"/rooms/{room}", method="GET")
        try:
            if await leg.head() != 200:
                return
            told = msgspec.json.decode(await leg.read(MOST_BYTES))
        except (LegError, msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            return
        finally:
            leg.abort()
        if isinstance(told, dict):
            for record in stage_records(room, told.get("stages"), str(target.worker)):
                if self._ledger.record(record):
                    self._on_stage(record)


def _finish(attempt: Attempt, meeting: Meeting, account: Account) -> None:
    """What could be seen of both legs from here is all of them that is kept. Seen first, then given
    back, then let go: the last makes the legs nobody's."""
    prefill, decode = attempt.prefill, attempt.decode
    meeting.decode_leg = (
        Leg(decode.status, decode.received_bytes, True) if decode.complete else _broken(decode)
    )
    if prefill is not None:
        meeting.prefill_leg = (
            Leg(prefill.status, prefill.received_bytes, True)
            if prefill.complete
            else _broken(prefill)
        )
    if not attempt.prefill_ended:  # else it was given back then
        account.release_prefill()
    attempt.let_go()
    if not meeting.sides:
        meeting.collected = True


def _broken(leg: Exchange) -> Leg:
    error = leg.error
    return Leg(leg.status, leg.received_bytes, False, "" if error is None else error.detail)


class Sample:
    """Says yes so many times a second, evenly; what was not used is not saved up."""

    def __init__(self, a_second: float) -> None:
        self._apart_s, self._next = 1.0 / a_second, 0.0

    def take(self, now: float) -> bool:
        """Is this one of them?"""
        if now < self._next:
            return False
        self._next = now + self._apart_s
        return True

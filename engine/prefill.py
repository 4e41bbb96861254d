"""Prefill: compute a prompt and hand its pages to the decode of its room.

Edge. Role of an engine over handing.py; api.py's leg is answered when the decode agreed. Open it
to change what a prefill does for a room.

    register ok? -> handing.py: compute, deliver, verdict -> one token, leg ends
        any failure: the decode is told at once (offers.fail), the leg fails with stage and reason
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial

from kvplane.runtime import Clock
from kvplane.vocabulary import Room, Stage, StageRecord

from .asks import Ask
from .errors import BadRequest, CutConnection, EngineError, RoomFailed
from .faults import Faults
from .handing import Handing
from .pieces import Written
from .registration import Registered
from .sequence import Emit
from .settings import FOLLOW, EngineSettings
from .team import Gives
from .unit import Unit


class Prefill:
    """One per engine of role prefill."""

    def __init__(
        self,
        settings: EngineSettings,
        handing: Handing,
        faults: Faults,
        registered: Callable[[int], Registered],
        placed: Callable[[Room, int], AbstractAsyncContextManager[None]],
        begin: Callable[[Ask, int, int], Sequence[Gives]],
        record: Callable[[StageRecord], None],
        clock: Clock,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._settings, self._handing, self._faults = settings, handing, faults
        self._registered, self._placed, self._begin = registered, placed, begin
        self._record, self._clock, self._decode = record, clock, decode

    async def run(self, unit: Unit, ask: Ask, emit: Emit) -> None:
        """One room. Raises RoomFailed, Overloaded, BadRequest."""
        room, team = ask.room, unit.team
        assert room is not None and team is not None, "a prefill has rooms and ranks"
        self._same_rank(unit, ask, room)
        try:
            await self._register(unit, room)
            begin = partial(self._begin, ask, unit.dp_rank)
            async with self._found(unit, ask, room):
                token, cached = await self._handing.run(unit, room, ask.ids, ask.salt, begin)
        except asyncio.CancelledError:
            team.fail(room, "its request was cancelled")
            raise
        except Exception as error:
            team.fail(room, str(error) or type(error).__name__)
            raise
        written = Written(self._decode, (), 1, ask.ignore_eos)
        inputs = await self._handing.inputs(unit, ask)
        emit(replace(written.add(ask.index, token, cached), inputs=inputs))

    async def _register(self, unit: Unit, room: Room) -> None:
        """No decode can find us unless this rank is registered: say so instead of waiting."""
        try:
            await self._faults.before(Stage.REGISTER, room)
            known = self._registered(unit.dp_rank)
            error = None if known.ok else RoomFailed(room, Stage.REGISTER, known.detail)
        except ConnectionResetError as reset:
            raise CutConnection(str(reset)) from reset
        except EngineError as injected:
            known = Registered(False, 0.0, str(injected))
            error = RoomFailed(room, Stage.REGISTER, str(injected))
        outcome = "failed" if error else "ok"
        by, at = self._settings.known_as, self._clock.wall()
        self._record(StageRecord(room, Stage.REGISTER, outcome, known.took_s, known.detail, by, at))
        if error is not None:
            raise error

    def _found(self, unit: Unit, ask: Ask, room: Room) -> AbstractAsyncContextManager[None]:
        """Where a decode cannot know the dp rank, the directory is told while the room lives."""
        asked = ask.prefill_dp_rank is None and self._settings.dp > 1
        if asked and self._settings.load_balance != FOLLOW:
            return self._placed(room, unit.dp_rank)
        return nullcontext()

    def _same_rank(self, unit: Unit, ask: Ask, room: Room) -> None:
        """Unless told, a decode looks for this room at rank room mod dp: refuse another one."""
        if self._settings.load_balance != FOLLOW:
            return
        follows = room % self._settings.dp
        if ask.prefill_dp_rank is None and unit.dp_rank != follows:
            reason = (
                f"routed_dp_rank {unit.dp_rank}: room {room} belongs to dp rank {follows} of "
                f"{self._settings.dp}, unless disagg_prefill_dp_rank says another"
            )
            raise BadRequest("routed_dp_rank", reason)

"""Both: prompt and answer in one engine, without a room.

Edge. The reference that prefill and decode are compared with. Open it to change what a unified
engine does with a bootstrap triple: it ignores one.
"""

from __future__ import annotations

from kvplane.vocabulary import Room, Stage

from .asks import Ask
from .errors import CutConnection
from .faults import Faults
from .sequence import Emit, Sequences
from .unit import Unit


class Both:
    """One per engine of role both."""

    def __init__(self, sequences: Sequences, faults: Faults) -> None:
        self._sequences, self._faults = sequences, faults

    async def run(self, unit: Unit, ask: Ask, emit: Emit) -> None:
        """One sample. Raises Overloaded, BadRequest."""
        try:
            await self._faults.before(Stage.CONSUME, ask.room or Room(0))
        except ConnectionResetError as error:
            raise CutConnection(str(error)) from error
        await self._sequences.local(unit, ask, emit)

"""Decode: fetch the pages of a room, then answer as if they had been computed here.

Edge. Role of an engine over transfer/ (team.py). Open it to change what a decode does for a room.

    lease -> pull (resolve, connect, verify: nothing unverified passes) -> consume -> answer
        waits for pages: the prefill is told to keep its own meanwhile
        failure: pages that late bytes may hit stay in quarantine until transfer/ has fenced them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplane.runtime import Clock
from kvplane.transfer import Metadata, prompt_sum
from kvplane.vocabulary import BootstrapTriple, Room, Stage, StageRecord

from .asks import Ask
from .cache import Lease
from .errors import CutConnection, RoomFailed
from .faults import Faults
from .metrics import EngineMetrics
from .model import PAGE_TOKENS, Context
from .sequence import Emit, Sequences, pages_of_prompt
from .settings import EngineSettings
from .unit import Unit


class Decode:
    """One per engine of role decode."""

    def __init__(
        self,
        settings: EngineSettings,
        sequences: Sequences,
        faults: Faults,
        record: Callable[[StageRecord], None],
        clock: Clock,
        metrics: EngineMetrics,
    ) -> None:
        self._settings, self._sequences, self._faults = settings, sequences, faults
        self._record, self._clock, self._metrics = record, clock, metrics

    async def run(self, unit: Unit, ask: Ask, emit: Emit) -> None:
        """One room. Raises RoomFailed, Overloaded, BadRequest."""
        assert ask.room is not None and ask.host is not None and ask.port is not None
        triple = BootstrapTriple(ask.host, ask.port, ask.room)
        assert unit.team is not None, "a decode has ranks"
        held = unit.team.holding(triple, ask.prefill_dp_rank)  # the prefill's pages, while we queue
        lease = await unit.lease(ask.ids, ask.max_new, ask.salt, held)
        try:
            metadata = await self._pull(unit, lease, ask, triple)
            context = await self._consume(unit, lease, ask.room, metadata, ask.wanted is not None)
            first, cached = metadata.first_token, metadata.cached_tokens
            await self._sequences.answer(unit, lease, context, first, ask, emit, cached)
        finally:
            unit.give_back(lease)

    async def _pull(self, unit: Unit, lease: Lease, ask: Ask, triple: BootstrapTriple) -> Metadata:
        """Verified pages behind those we hold ourselves."""
        assert unit.team is not None, "a decode has ranks"
        held = lease.cached_tokens // PAGE_TOKENS
        pages = pages_of_prompt(unit, lease, ask.ids)[held:]
        fenced: list[int] = []

        def released(given: Sequence[int]) -> None:
            """No late byte can hit these: now, or some time after the failure."""
            fenced.extend(given)
            unit.unquarantine(given)

        try:
            metadata = await unit.team.pull(
                triple,
                pages,
                len(ask.ids),
                deadline_s=self._settings.room_s,
                released=released,
                dp_rank=ask.prefill_dp_rank,
                held_pages=held,
                prompt=prompt_sum(ask.ids),
            )
        except BaseException:
            unit.quarantine(lease, pages)
            unit.unquarantine(fenced)
            raise
        self._metrics.tokens.labels("fetched").inc(len(ask.ids) - lease.cached_tokens)
        return metadata

    async def _consume(
        self, unit: Unit, lease: Lease, room: Room, metadata: Metadata, told: bool
    ) -> Context:
        """Take verified pages into our own cache and read them; `told`: how likely each token is
        will be asked."""
        began = self._clock.now()
        failed: str | None = "cancelled"
        try:
            await self._faults.before(Stage.CONSUME, room)
            if not 0 <= metadata.first_token < unit.model.size.vocab:
                raise ValueError(f"first token {metadata.first_token} is none of this model")
            tokens = len(lease.tokens)
            unit.computed(lease, tokens)
            again = 1 if told else 0
            context = await unit.open(lease, tokens - again)
            if again:  # its state did not come with the pages; its KV is the same, bit by bit
                await unit.compute.run(unit.model.feed, context, tuple(lease.tokens)[-again:])
            failed = None
            return context
        except ConnectionResetError as error:
            failed = str(error)
            raise CutConnection(failed) from error
        except Exception as error:
            failed = str(error) or type(error).__name__
            raise RoomFailed(room, Stage.CONSUME, failed) from error
        finally:
            outcome = "ok" if failed is None else "failed"
            detail = failed or f"{len(lease.tokens)} tokens in {len(lease.pages)} pages"
            took, at = self._clock.now() - began, self._clock.wall()
            by = self._settings.known_as
            self._record(StageRecord(room, Stage.CONSUME, outcome, took, detail, by, at))

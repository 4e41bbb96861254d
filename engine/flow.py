"""Flow: all samples of one body at work at once.

Edge. serving.py reads its pieces and closes it; closing ends every sample and gives back its pages.
Open it to change what happens to the other samples when one fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from kvplane.runtime import cancel

from .asks import Ask, Call
from .errors import BadRequest, EngineError, Overloaded
from .metrics import EngineMetrics
from .pieces import Piece

log = logging.getLogger(__name__)

Run = Callable[[Ask, Callable[[Piece], None]], Awaitable[None]]


class Flow:
    """One call. Iterate `pieces`, then `close`, on every path."""

    def __init__(self, call: Call, run: Run, metrics: EngineMetrics) -> None:
        self.call = call
        self._run, self._metrics = run, metrics
        self._queue: asyncio.Queue[Piece | EngineError] = asyncio.Queue()
        self._open = {ask.index for ask in call.asks}
        self._tasks = [asyncio.create_task(self._sample(ask)) for ask in call.asks]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece as it is made; raises the first failure of any sample."""
        while self._open:
            piece = await self._queue.get()
            if isinstance(piece, EngineError):
                raise piece
            if piece.finish is not None:
                self._open.discard(piece.index)
            yield piece

    def abort(self) -> None:
        """End every sample now; its client is told so."""
        for ask, task in zip(self.call.asks, self._tasks, strict=True):
            if not task.done():
                task.cancel()
                self._queue.put_nowait(Piece(ask.index, None, finish="abort"))

    def fail(self, error: EngineError) -> None:
        """End every sample with this error."""
        self._queue.put_nowait(error)

    async def close(self) -> None:
        """Until every sample has let go of its pages."""
        await cancel(*self._tasks)

    async def _sample(self, ask: Ask) -> None:
        outcome = "cancelled"
        try:
            await self._run(ask, self._queue.put_nowait)
            outcome = "ok"
        except EngineError as error:
            outcome = "refused" if isinstance(error, BadRequest | Overloaded) else "failed"
            self._queue.put_nowait(error)
        except Exception:
            outcome = "failed"
            log.exception("sample failed rid=%s index=%d", self.call.rid, ask.index)
            self._queue.put_nowait(EngineError("the engine failed; its log says why"))
        finally:
            self._metrics.samples.labels(outcome).inc()

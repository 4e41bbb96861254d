"""Compute: the one thread in which the model runs.

Edge. The event loop hands over short jobs (a slice of a prompt, one token) and stays free. Jobs run
one after the other, first come first served, so sequences take turns. Open it to change who waits
for whom.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvplane.runtime import Clock

from . import blas
from .metrics import EngineMetrics

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """A queue and its thread; the queue is as long as there are sequences at work."""

    def __init__(self, clock: Clock, metrics: EngineMetrics) -> None:
        if not blas.one_thread():
            log.warning("BLAS not told threads=1 action=go_on hint=OPENBLAS_NUM_THREADS=1")
        self._executor = ThreadPoolExecutor(1, "compute")
        self._clock = clock
        self._metrics = metrics

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of the job. When cancelled, raises only after the job has let go of memory."""
        began = self._clock.now()
        future = self._executor.submit(job, *args, **kwargs)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            future.cancel()  # not begun yet: never will
            await _over(waiting)
            raise
        finally:
            self._metrics.compute.observe(self._clock.now() - began)

    def stop(self) -> None:
        """End the thread; jobs are over by then, since whoever asked waits for them."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _over(future: asyncio.Future[T]) -> None:
    """Stay until the job is over, however often we are cancelled; a job takes milliseconds."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # taken note of: nobody else will

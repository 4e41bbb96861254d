"""onesided_work: blocking calls of a transfer library, run with a deadline that is ours.

Edge. A library call cannot be interrupted: at our deadline the caller goes on without it, the
thread ends when the library lets it, and until then the peer is not clean. One silent peer never
takes all threads. Open it to change what waits for what.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvplane.vocabulary import Stage

from ..errors import Refused, Stalled, TransferError


class Stop:
    """Tells a worker thread that nobody waits any more. Any thread."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._event = threading.Event()

    def set(self) -> None:
        """Now."""
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep so long or until stopped; is it over?"""
        left = self._deadline - time.monotonic()
        return left <= 0 or self._event.wait(min(seconds, left)) or self.over

    @property
    def over(self) -> bool:
        """Stopped, or past the deadline."""
        return self._event.is_set() or time.monotonic() >= self._deadline


class OneSidedPeer:
    """Prefill side of one attempt; see base.Peer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.open = True
        self.jobs = 0  # calls that a thread may be in
        self._failed = False

    @property
    def clean(self) -> bool:
        """Nothing is under way, and nothing failed in a way that leaves it open."""
        return not self.jobs and not self._failed

    def ended(self, error: BaseException | None) -> None:
        """One call less. Refused is said before anything leaves."""
        self.jobs -= 1
        if error is not None and not isinstance(error, Refused):
            self._failed = True


class Workers:
    """The threads, and how many of them one remote process may hold."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._share = max(1, threads // 2)
        self._held: dict[str, int] = {}  # remote process -> threads it holds
        self._freed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self,
        peer: OneSidedPeer,
        whom: str,
        call: Callable[[Stop], None],
        deadline_s: float,
        stage: Stage = Stage.VERIFY,
    ) -> None:
        """Until `call` returned, or the deadline. Raises TransferError."""
        stop = Stop(deadline_s)
        job: Future[None] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                await self._thread_for(whom)
                job = self._pool.submit(call, stop)
                peer.jobs += 1
                self._watch(peer, whom, job)
                await asyncio.shield(asyncio.wrap_future(job))
        except TimeoutError as error:
            raise Stalled(peer.address, "write not confirmed within its deadline", stage) from error
        except TransferError as error:
            error.stage = stage
            raise
        finally:
            stop.set()
            if job is not None:
                job.cancel()

    async def _thread_for(self, whom: str) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: self._held.get(whom, 0) < self._share)
            self._held[whom] = self._held.get(whom, 0) + 1

    def _watch(self, peer: OneSidedPeer, whom: str, job: Future[None]) -> None:
        """On the loop, when the thread is out of the call; later than our deadline perhaps."""
        task = asyncio.create_task(self._ended(peer, whom, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ended(self, peer: OneSidedPeer, whom: str, job: Future[None]) -> None:
        done = asyncio.wrap_future(job)
        await asyncio.wait([done])
        cancelled = done.cancelled()  # never began: nothing left through it
        peer.ended(None if cancelled else done.exception())
        async with self._freed:
            self._held[whom] -= 1
            if not self._held[whom]:
                del self._held[whom]
            self._freed.notify_all()

    async def stop(self, most_s: float) -> None:
        """Wait for the threads, bounded; the libraries end their calls themselves."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=most_s)
        for task in self._tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        return sum(self._held.values())

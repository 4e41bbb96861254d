"""onesided_work: blocking calls of a transfer library, run with a deadline that is ours.

Edge. A library call cannot be interrupted: at our deadline the caller goes on without it, the
thread ends when the library lets it, and until then the peer is not clean. One silent process
never takes all threads. Open it to change what waits for what.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from kvplane.vocabulary import Stage

from ..errors import Stalled, TransferError

Ended = Callable[[BaseException | None], None]  # told once the thread is out of the call


class Stop:
    """Tells a worker thread that nobody waits any more. Any thread."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._event = threading.Event()

    def set(self) -> None:
        """Now."""
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep so long or until it is over; is it?"""
        left = self._deadline - time.monotonic()
        return left <= 0 or self._event.wait(min(seconds, left)) or self.over

    @property
    def over(self) -> bool:
        """Stopped, or past the deadline."""
        return self._event.is_set() or time.monotonic() >= self._deadline


class Workers:
    """The threads, and how many of them one remote process may hold."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._share = max(1, threads // 2)
        self._gates: dict[str, tuple[asyncio.Semaphore, set[object]]] = {}
        self._jobs: set[asyncio.Future[None]] = set()

    async def run(
        self,
        whom: str,
        address: str,
        call: Callable[[Stop], None],
        deadline_s: float,
        ended: Ended,
        stage: Stage = Stage.VERIFY,
    ) -> None:
        """Until `call` returned, or the deadline. Raises TransferError.

        `whom` is the remote process, `address` its name in sentences. `ended` is called exactly
        once: no thread is in `call` any more, or ever was; perhaps long after this raised.
        """
        stop, asked = Stop(deadline_s), False
        try:
            async with asyncio.timeout(deadline_s), self._gate(whom) as leave:
                job, asked = self._pool.submit(call, stop), True
                done = asyncio.wrap_future(job)
                done.add_done_callback(lambda future: self._ended(future, ended, leave))
                self._jobs.add(done)
                try:
                    await asyncio.wait([done])
                finally:
                    job.cancel()  # where no thread took it yet
            done.result()
        except TimeoutError as error:
            raise Stalled(address, "not confirmed within its deadline", stage) from error
        except TransferError as error:
            error.stage = stage
            raise
        finally:
            stop.set()
            if not asked:
                ended(None)

    @asynccontextmanager
    async def _gate(self, whom: str) -> AsyncIterator[Callable[[], None]]:
        """A thread is free for this process; what is yielded gives it back, whenever it is."""
        gate, inside = self._gates.setdefault(whom, (asyncio.Semaphore(self._share), set()))
        me = object()
        inside.add(me)

        def leave(acquired: bool = True) -> None:
            if acquired:
                gate.release()
            inside.discard(me)
            if not inside:
                self._gates.pop(whom, None)

        try:
            await gate.acquire()
        except BaseException:
            leave(acquired=False)
            raise
        yield leave

    def _ended(self, job: asyncio.Future[None], ended: Ended, leave: Callable[[], None]) -> None:
        """First of all callbacks, so that who waited sees a peer that is clean again."""
        self._jobs.discard(job)
        leave()
        ended(None if job.cancelled() else job.exception())

    async def stop(self, most_s: float) -> None:
        """Wait for the threads, bounded; the libraries end their calls themselves."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=most_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        return len(self._jobs)

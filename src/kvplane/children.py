"""Children: processes of ours that never outlive us.

Edge. Used by demo.py and by the story tests. Open it to change how a process is started, watched
or ended.

    start: spawn, wait until its URL answers 200     stop: SIGTERM, wait, SIGKILL
    we die first (even by SIGKILL): the kernel tells it (Linux), and its stdin ends
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import aiohttp

from kvplane.runtime import Clock, SystemClock

_PR_SET_PDEATHSIG = 1
KEPT_LINES = 40  # of what a child wrote last, for the error that names it
STOP_S = 5.0  # a child that ignores SIGTERM this long is killed


class ChildFailed(RuntimeError):
    """A process ended, or did not answer in time; holds the last lines it wrote."""


def _die_with_parent() -> None:
    """In the child, before exec: SIGKILL when the parent is gone; Linux only, else no promise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One `kvplane` command as a process of its own; a Part."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        health_url: str | None,
        deadline_s: float = 60.0,
        environ: Mapping[str, str] | None = None,  # all of it; else ours
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._command = [sys.executable, "-m", "kvplane", *arguments]
        self._health_url, self._deadline_s = health_url, deadline_s
        self._environ = dict(os.environ if environ is None else environ)
        self._clock = clock or SystemClock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Returns when the child answers; raises ChildFailed, and then nothing is left of it."""
        # A new session: Ctrl-C in the terminal reaches us alone, and we end the children in order.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environ,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = asyncio.create_task(self._read(), name=f"read {self.name}")
        try:
            if self._health_url is not None:
                await self._answers(self._health_url)
        except BaseException:
            await self.stop()
            raise

    async def _answers(self, url: str) -> None:
        until = self._clock.now() + self._deadline_s
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if self.returncode is not None:
                    raise ChildFailed(self._told(f"ended with status {self.returncode}"))
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                if self._clock.now() > until:
                    raise ChildFailed(self._told(f"{url} silent for {self._deadline_s:.0f} s"))
                await self._clock.sleep(0.05)

    async def stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL now, for tests that want a death without a farewell."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())

    def _told(self, what: str) -> str:
        return "\n  ".join([f"{self.name} {what}; it wrote:", *(self.lines or ["nothing"])])


async def stop_all(children: Iterable[Child]) -> None:
    """End them side by side: as long as the slowest takes, not as long as all together."""
    await asyncio.gather(*(child.stop() for child in children))

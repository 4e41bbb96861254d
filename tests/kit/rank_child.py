"""The hand that holds a rank_process: starts it, hears it, stops, wakes and kills it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from kit import rank_process as kit
from kit.wait import until

TESTS = Path(kit.__file__).parents[1]


class Child:
    """One rank_process and what it said."""

    def __init__(self, *words: str, backend: str = "tcp") -> None:
        self._words, self._backend = words, backend
        self.said: list[dict[str, Any]] = []

    async def start(self) -> Child:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kit.rank_process", *self._words, cwd=TESTS,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, kit.BACKEND: self._backend},
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read())
        await until(lambda: self.said, 30, what="the child listens")
        self.port = self.said[0]["port"]
        return self

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.said.append(json.loads(line))

    def room(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"room {number}\n".encode())

    def outcome(self, room: int) -> dict[str, Any] | None:
        return next((event for event in self.said if event.get("room") == room), None)

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    async def stop(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it was killed just now
                self.send(signal.SIGCONT)
                self._process.kill()
        await self._process.wait()
        await self._reader

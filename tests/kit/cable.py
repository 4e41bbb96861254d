"""Cable: a TCP line to a port, in the test's hands: cut, frozen, slow, mended; it counts too."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from kit.ports import free_ports


@dataclass
class Cable:
    """`cut`: both ends see it closed, and nobody answers. `freeze`: nothing moves, nothing ends.

    `delay_s`: every piece waits so long on its way, each way. `pieces`: how many went to the port.
    """

    port: int
    listen: int = field(default_factory=lambda: free_ports(1)[0])
    whole: bool = True
    delay_s: float = 0.0
    pieces: int = 0
    answers: int = 0  # pieces that came back

    async def __aenter__(self) -> Cable:
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.listen)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self.whole = False
        self._flows.set()
        for end in list(self._ends):
            end.transport.abort()

    def freeze(self) -> None:
        """As a network that drops all: what was sent comes when it is mended, as TCP would."""
        self._flows.clear()

    def mend(self) -> None:
        self.whole = True
        self._flows.set()

    async def _serve(self, near: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._ends.add(out)
        there: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            if self.whole:
                far, there = await asyncio.open_connection("127.0.0.1", self.port)
                self._ends.add(there)
                await asyncio.gather(self._pump(near, there, True), self._pump(far, out, False))
        except OSError:
            pass
        except asyncio.CancelledError:
            pass  # the test is over; streams would log it
        finally:
            for end in (out, there):
                if end is not None:
                    end.transport.abort()
                    self._ends.discard(end)
            self._tasks.discard(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, to_port: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flows.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                self.pieces += to_port
                self.answers += not to_port
                sink.write(data)
                await sink.drain()
        sink.transport.abort()

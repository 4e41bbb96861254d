"""Wiring: which command runs which parts.

Edge of the roof. __main__.py calls run(); each command makes the parts of its process and serves
until told to stop. plane.py says what a process is made of. Open it to add a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane.options import NEEDS_REDIS
from kvplane.settings import Settings, parser, resolve

if TYPE_CHECKING:
    from kvplane.runtime import Part
    from kvplane.vocabulary import WorkerUp


BUILTIN = "builtin"  # the tiny engine's own tokenizer


def run(told: Settings) -> int:
    """Run one command to its end; returns the exit status."""
    if told.command == "healthy":
        from kvplane.health import healthy

        return healthy(told["url"])
    if told.command in NEEDS_REDIS and told["redis"] is None:
        _complain(f"redis is missing: kvplane {told.command} needs --redis redis://host:6379/0")
        return 2
    if told.values.get("evidence_secs") and told["redis"] is None:
        _complain(
            "evidence_secs: evidence is shared through Redis; add --redis redis://host:6379/0"
        )
        return 2
    folder = told.values.get("tokenizer") or BUILTIN
    if folder != BUILTIN and not (Path(folder) / "tokenizer.json").is_file():
        want = f"no tokenizer.json there; name a folder that has one, or {BUILTIN!r}"
        _complain(f"tokenizer = {folder!r}: {want}")
        return 2
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_guarded(told))
    _end_hard(code)
    return code


def _end_hard(code: int) -> None:
    """Where a library (NIXL) would crash an interpreter that exits; all is stopped by now."""
    if "kvplane.transfer" not in sys.modules:
        return
    from kvplane.transfer import must_exit_hard

    if must_exit_hard():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _complain(line: str) -> None:
    sys.stderr.write(f"kvplane: {line}\n")


async def _guarded(told: Settings) -> int:
    """The command; what may go wrong on an honest machine is one line, not a traceback."""
    from kvplane.tls import BadTls

    try:
        return await COMMANDS[told.command](told)
    except Exception as raised:
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        sentence = _sentence(told, error)
        if sentence is None:
            raise
        _complain(sentence)
        return 2 if isinstance(error, BadTls) else 1


def _sentence(told: Settings, error: BaseException) -> str | None:
    """What a person reads of an error that is no fault of this program; None for the others."""
    import aiohttp

    from kvplane import terminal
    from kvplane.children import ChildFailed
    from kvplane.demo import DemoFailed
    from kvplane.index import IndexFault

    if isinstance(error, aiohttp.ClientError | TimeoutError):
        return terminal.unreachable(told.values.get("url", "a worker"), error)
    if isinstance(error, terminal.NotKvplane):
        return f"{told['url']}: {error}"
    extra = isinstance(error, ImportError) and getattr(error, "extra", None)  # not installed
    if extra or isinstance(error, OSError | ChildFailed | DemoFailed | IndexFault):
        return str(error)
    return None


async def _serve(part: Part) -> int:
    from kvplane.runtime import running, spare_garbage_looks

    async with _signals() as told_to_stop, running([part]):
        spare_garbage_looks()
        await told_to_stop.wait()
    return 0


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    try:
        yield told
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


# Each imports only what its process needs: an engine without the gateway starts in half the time.


async def _router(told: Settings) -> int:
    from kvplane.plane import GatewayPlane

    return await _serve(GatewayPlane(told, told.workers, told["port"]))


async def _ingest(told: Settings) -> int:
    from kvplane.plane import IngestPlane

    return await _serve(IngestPlane(told))


async def _index(told: Settings) -> int:
    from kvplane.plane import IndexPlane

    return await _serve(IndexPlane(told))


async def _bootstrap(told: Settings) -> int:
    from kvplane.engines import Directory, directory_settings, tls

    directory = Directory(told["host"], told["port"], directory_settings(told), tls(told))
    return await _serve(directory)


async def _engine(told: Settings) -> int:
    from kvplane.engine import BadSetting
    from kvplane.engines import EngineProcess

    try:
        return await _serve(EngineProcess(told))
    except BadSetting as error:
        _complain(str(error))
        return 2


async def _demo(told: Settings) -> int:
    """The chat, and with `once` the end; Ctrl-C at any time ends everything in order."""
    from kvplane import terminal  # before signals are heard: until then nothing has to be undone
    from kvplane.demo import demo
    from kvplane.plane import GatewayPlane

    async with _signals() as ended:

        def make_plane(workers: list[WorkerUp], port: int) -> Part:
            words = ["all", "--tokenizer", "builtin", "--host", told["host"]]
            return GatewayPlane(resolve(vars(parser().parse_args(words)), {}, {}), workers, port)

        serving = asyncio.Event()

        async def until_told() -> None:
            serving.set()
            await ended.wait()

        show = demo(make_plane, told["port"], told["once"], terminal.say, until_told)
        work, stop = asyncio.create_task(show), asyncio.create_task(ended.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done() and not serving.is_set():
            work.cancel()  # Ctrl-C while it starts or chats: undo what was begun
            await asyncio.wait((work,))
            return 130
        await work
    return 0


async def _rank(told: Settings) -> int:
    from kvplane import terminal

    return await terminal.rank(told)


async def _doctor(told: Settings) -> int:
    from kvplane.doctor import doctor

    return await doctor(told)


async def _tail(told: Settings) -> int:
    """Until Ctrl-C, which is how it is meant to end."""
    from kvplane import tailing

    async with _signals() as ended:
        work, stop = asyncio.create_task(tailing.tail(told)), asyncio.create_task(ended.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            return await work
        work.cancel()
        await asyncio.wait((work,))
    return 0


COMMANDS: dict[str, Callable[[Settings], Awaitable[int]]] = {
    "all": _router,
    "router": _router,
    "bootstrap": _bootstrap,
    "ingest": _ingest,
    "index": _index,
    "engine": _engine,
    "demo": _demo,
    "rank": _rank,
    "doctor": _doctor,
    "tail": _tail,
}

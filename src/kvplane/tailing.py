"""Tailing: kvplane tail, the changes of the index as they happen, for people.

Door of the roof. Follows GET /changes of a gateway or an index process and prints what comes, as
words or as the records themselves; terminal.py has what it shares with other commands. Open it to
change what a person reads of a change, or what happens when the other side goes away.

    connection lost, server ended   say so, go on from the last cursor with growing pauses
    cursor gone                     say so, go on from now
    nobody there at the very start  the error of a wrong URL, exit status 1
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvplane.runtime import Clock, SystemClock, backoff
from kvplane.settings import Settings
from kvplane.terminal import TIMEOUT_S, NotKvplane, complain, say, unreachable

PATH = "/index/changes"  # a gateway's; an index process has it under the same path
SILENT_S = 60.0  # the server says something every 15 s, if only that nothing is new
MOST_BYTES = 256 << 20  # of one event; a batch has kilobytes
_GROUPS = {"window": "window of {tokens} tokens", "chunk": "chunks of {tokens} tokens"}


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; `id` alone moves the cursor."""

    id: str
    name: str
    data: str


class Events:
    """Server-sent events out of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Those that are whole now; comments are none."""
        start = max(0, len(self._held) - 1)
        self._held += piece
        if len(self._held) > MOST_BYTES:
            raise NotKvplane(f"is this kvplane? an event is longer than {MOST_BYTES >> 20} MiB")
        while (end := self._held.find(b"\n\n", start)) >= 0:
            text, start = self._held[:end].decode(), 0
            del self._held[: end + 2]
            lines = [line.partition(": ") for line in text.split("\n") if not line.startswith(":")]
            found = {name: value for name, _, value in lines}
            if found:
                yield Event(found.get("id", ""), found.get("event", ""), found.get("data", ""))


def words(record: Mapping[str, Any]) -> Iterator[str]:
    """A line for each change of one record of the stream."""
    at = time.strftime("%H:%M:%S", time.localtime(record["at"]))
    for change in record["changes"]:
        yield _plain(f"{at}  {change['worker']:<24} {_said(change)}")


def _plain(text: str) -> str:
    """As one line, and nothing in it that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _printable(data: str) -> str:
    """The same record, and nothing in it that a terminal would obey."""
    return data if data.isprintable() else json.dumps(json.loads(data), separators=(",", ":"))


def _said(change: Mapping[str, Any]) -> str:
    kind, tier = change["kind"], change.get("tier")
    if kind == "known":
        by = f" (ingest {change['by']})" if change.get("by") else ""  # of two, each says its own
        return f"known    {change['state']}: {change['reason']}{by}"
    if kind == "cleared":
        return f"cleared  {tier or 'everything'}: {change['reason']}"
    group, count = change.get("group"), len(change["blocks"])
    shown = f"{kind:<8} {count} block{'' if count == 1 else 's'}"
    shown += f" {'on' if kind == 'stored' else 'from'} {tier}"
    if isinstance(group, Mapping):  # its rule is told where blocks are stored
        rule = _GROUPS.get(group["kind"], str(group["kind"])).format(**group)
        return f"{shown}, cache group {group['number']} ({rule})"
    return shown if group is None else f"{shown}, cache group {group}"


class _Again(Exception):
    """The stream ended and may be asked for again, from the same cursor unless `fresh`."""

    def __init__(self, why: str, fresh: bool = False, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.fresh, self.after_s = fresh, after_s


async def tail(told: Settings, clock: Clock | None = None) -> int:
    """Print every change until cancelled; 1 where nobody can be followed, 0 if nobody reads us."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=SILENT_S)
    tailing, clock = _Tail(told), clock or SystemClock()
    waits, told_away = backoff(0.2, most_s=5.0), False
    async with aiohttp.ClientSession(told["url"], timeout=timeout) as session:
        while True:
            pause = 0.0
            heard = tailing.heard
            try:
                await tailing.once(session)
            except BrokenPipeError:
                _nobody_reads()
                return 0
            except (_Again, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                if not tailing.reached:
                    raise
                if tailing.heard > heard:
                    waits, told_away = backoff(0.2, most_s=5.0), False
                why = str(error) if isinstance(error, _Again) else unreachable(told["url"], error)
                pause = error.after_s if isinstance(error, _Again) else 0.0
                if isinstance(error, _Again) and error.fresh:
                    tailing.cursor = ""
                    complain(f"{why}; going on from now, changes in between are not shown")
                elif not told_away:
                    complain(f"{why}; trying again")
                    told_away = True
            await clock.sleep(max(pause, next(waits)))


class _Tail:
    """Where we are in the stream, over all connections."""

    def __init__(self, told: Settings) -> None:
        self.cursor, self._json, self._url = told["after"], told["json"], told["url"]
        self.reached = False  # a change stream was there at least once
        self.heard = 0  # events, to see whether a connection was any good

    async def once(self, session: aiohttp.ClientSession) -> None:
        """One connection to its end, which is always an exception."""
        headers = {"last-event-id": self.cursor} if self.cursor else {}
        async with session.get(PATH, headers=headers) as answer:
            if answer.status != 200:
                raise await self._refused(answer)
            if answer.content_type != "text/event-stream":
                raise NotKvplane(f"is this kvplane? {PATH} answered without a change stream")
            self.reached, events = True, Events()
            async for piece in answer.content.iter_any():
                with _ours():
                    for event in events.feed(piece):
                        self._take(event)
        raise _Again(f"{self._url} has ended the stream")

    def _take(self, event: Event) -> None:
        self.heard += 1
        if event.name in ("gone", "error"):
            raise _Again(_reason(event.data), fresh=event.name == "gone")
        if event.name == "changes":
            lines = [_printable(event.data)] if self._json else words(json.loads(event.data))
            for line in lines:
                say(line)
        self.cursor = event.id or self.cursor

    async def _refused(self, answer: aiohttp.ClientResponse) -> Exception:
        why = _reason(await answer.text())
        if answer.status == 410:
            self.reached = True
            return _Again(why, fresh=True)
        if answer.status in (429, 503):
            self.reached = True
            after = answer.headers.get("retry-after", "")
            return _Again(why, after_s=float(after) if after.isdecimal() else 1.0)
        if self.reached:  # a proxy in between whose other side is away
            return _Again(f"{PATH} answered {answer.status}")
        return NotKvplane(f"is this kvplane? {PATH} answered {answer.status} {why}".rstrip())


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """Raises NotKvplane for a stream that is none of ours."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise NotKvplane(f"is this kvplane? {PATH} sent what is no change: {why}") from None


def _reason(text: str) -> str:
    """The words of an error of ours; empty for any other text."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        return str(json.loads(text)["error"]["message"])
    return ""


def _nobody_reads() -> None:
    """`kvplane tail | head`: end quietly, also when the interpreter flushes at its own end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

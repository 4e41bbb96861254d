"""Landing: what has arrived of one attempt, for backends whose receiver decides what lands.

Edge: touched by receiver threads and by the event loop. Used by tcp_receiver.py and fake.py.
Open it to change when an attempt counts as moving, broken or fenced.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvplane.vocabulary import Stage

from ..errors import Refused, TransferError
from ..metadata import POISON
from ..regions import Regions
from .base import Offer, Ticket


class OpenLanding:
    """Pages still wanted, the aux slot, and how it went. Made on the event loop."""

    def __init__(self, ticket: Ticket, regions: Regions, offer: Offer, deadline_s: float) -> None:
        regions.check(ticket.pages)
        self.ticket, self.offer = ticket, offer
        self.regions = regions.select(ticket.regions)  # the part of each page that may land
        self.deadline = time.monotonic() + deadline_s
        self.lock = threading.Lock()
        self.fenced = False  # under lock; once true nothing more is admitted
        self.recorded = False  # the slot holds a whole record
        self.slot = bytearray([POISON]) * ticket.aux_bytes
        self.wanted = set(ticket.pages)  # under lock
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        self.moving = asyncio.Event()

    @property
    def landed(self) -> int:
        """How many pages are complete."""
        return len(self.ticket.pages) - len(self.wanted)

    def fault_of(self, record: bool) -> TransferError | None:
        """What is against a further write, beside its own form; None = nothing."""
        if not self.recorded:
            return None
        what = "a second record" if record else "pages after the record"
        return Refused(self.ticket.peer, f"data head: {what}", Stage.VERIFY)

    def started(self) -> None:
        """Any thread: payload is announced."""
        self._call(self.moving.set)

    def landed_pages(self, pages: tuple[int, ...]) -> None:
        """Any thread: these are complete."""
        with self.lock:
            self.wanted.difference_update(pages)

    def break_off(self, error: TransferError) -> None:
        """Any thread: the data path failed; the first reason counts."""
        self._call(self._fail, error)

    def take(self) -> bytes:
        """The record, once; the slot is poisoned again."""
        with self.lock:
            data = bytes(self.slot)
            self.slot[:] = bytes([POISON]) * len(self.slot)
        return data

    def left_s(self, most_s: float) -> float:
        """Time allowed for the next step: `most_s`, or what is left; more than 0."""
        return max(0.001, min(most_s, self.deadline - time.monotonic()))

    def _fail(self, error: TransferError) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
            self.broken.exception()  # whoever looks will see it; nobody must

    def _call(self, what: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(what, *args)

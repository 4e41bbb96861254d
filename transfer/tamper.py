"""Tamper: what may a test break between the sender's memory and the receiver's verify?

Pure. offer.py calls these hooks *after* it computed checksums from its own memory, so whatever is
changed here is exactly what the receiver must notice. Production passes UNTOUCHED. The engine's
fault switches (engine/faults.py) implement Tamper with the helpers below.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from kvplane.vocabulary import Generation, Room, Stage

from .metadata import Metadata
from .regions import PageOut


class Tamper(Protocol):
    """Hooks on the prefill's way out; each may be called for every room."""

    async def before(self, stage: Stage, room: Room) -> None:
        """Before connect (a decode binds) and verify (pages leave): may delay, hang or raise.

        ConnectionResetError cuts the control connection without a word; any other exception is
        told to the decode.
        """

    def pages(self, room: Room, pages: list[PageOut]) -> list[PageOut]:
        """What really leaves instead of `pages`."""

    def metadata(self, room: Room, metadata: Metadata) -> Metadata:
        """What the record says instead."""

    def generation(self, room: Room, generation: Generation) -> Generation:
        """The decode's generation as the data header states it."""


class Untouched:
    """Changes nothing."""

    async def before(self, stage: Stage, room: Room) -> None:
        """Nothing."""

    def pages(self, room: Room, pages: list[PageOut]) -> list[PageOut]:
        """The same."""
        return pages

    def metadata(self, room: Room, metadata: Metadata) -> Metadata:
        """The same."""
        return metadata

    def generation(self, room: Room, generation: Generation) -> Generation:
        """The same."""
        return generation


UNTOUCHED = Untouched()


def flip_byte(pages: list[PageOut], at: int, bit: int = 0) -> list[PageOut]:
    """One bit of byte `at` (counted over all pages, wraps) is wrong; the sender's memory is not."""
    sizes = [sum(len(part) for part in page.parts) for page in pages]
    at %= sum(sizes)
    index = 0
    while at >= sizes[index]:
        at -= sizes[index]
        index += 1
    parts = [bytearray(part) for part in pages[index].parts]
    for part in parts:
        if at < len(part):
            part[at] ^= 1 << (bit % 8)
            break
        at -= len(part)
    changed = PageOut(pages[index].page, tuple(memoryview(part) for part in parts))
    return [*pages[:index], changed, *pages[index + 1 :]]


def swap_pages(pages: list[PageOut], first: int = 0, second: int = -1) -> list[PageOut]:
    """The bytes of two pages change places; one page alone stays as it is."""
    swapped = list(pages)
    swapped[first] = dataclasses.replace(pages[second], page=pages[first].page)
    swapped[second] = dataclasses.replace(pages[first], page=pages[second].page)
    return swapped


def drop_last(pages: list[PageOut]) -> list[PageOut]:
    """One page fewer than promised."""
    return pages[:-1]


def foreign_room(metadata: Metadata) -> Metadata:
    """The record of another room."""
    return dataclasses.replace(metadata, room=Room(metadata.room ^ 2))


def stale_generation(metadata: Metadata) -> Metadata:
    """The record of another life of this prefill."""
    return dataclasses.replace(metadata, generation=Generation(f"{metadata.generation}-stale"))

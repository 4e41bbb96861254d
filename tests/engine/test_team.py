"""Team: whatever ends a meeting of several ranks, its pages come back exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplane.engine.errors import RoomFailed
from kvplane.engine.stages import Stages
from kvplane.engine.team import Team
from kvplane.transfer import Metadata, PeerGone
from kvplane.vocabulary import BootstrapTriple, Room

TRIPLE = BootstrapTriple("127.0.0.1", 8998, Room(7))
PAGES = (3, 4)
End = Callable[["asyncio.Task[Any]"], None]


class Quick:
    """A rank whose pull succeeds at once; `end` hears of it before the team does."""

    name = ""

    def __init__(self, first_token: int, end: End) -> None:
        self.puller, self._end = self, end
        self._said = Metadata(Room(7), first_token=first_token)

    async def pull(self, *_: object, **__: object) -> Metadata:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(self._end)
        return self._said

    def give_up(self, room: Room, reason: str) -> None:
        raise AssertionError("nobody failed")


def pulling(tokens: Sequence[int], end: End, back: list[tuple[int, ...]]) -> Any:
    team = Team([Quick(token, end) for token in tokens], Stages([], lambda _: None))
    return team.pull(
        TRIPLE, PAGES, 32, deadline_s=9.0, released=lambda pages: back.append(tuple(pages))
    )


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_request_that_ends_just_as_all_ranks_succeeded_gives_its_pages_back(
    ranks: int,
) -> None:
    """The pages are the caller's only where it got the answer."""
    back: list[tuple[int, ...]] = []
    out = asyncio.ensure_future(pulling([5] * ranks, lambda _: out.cancel(), back))
    with pytest.raises(asyncio.CancelledError):
        await out
    await asyncio.sleep(0)
    assert back == [PAGES]


async def test_ranks_that_succeed_with_different_tokens_give_the_pages_back() -> None:
    back: list[tuple[int, ...]] = []
    with pytest.raises(RoomFailed, match="first token 6"):
        await pulling([5, 6], lambda _: None, back)
    await asyncio.sleep(0)
    assert back == [PAGES]


async def test_pages_of_an_answer_stay_the_callers() -> None:
    back: list[tuple[int, ...]] = []
    assert (await pulling([5, 5], lambda _: None, back)).first_token == 5
    await asyncio.sleep(0)
    assert back == []


class Breaks:
    """A rank whose pull fails; its pages are safe at once, or when a test says so."""

    name = ""

    def __init__(self, late: bool) -> None:
        self.puller, self._late = self, late

    async def pull(
        self, *_: object, released: Callable[[Sequence[int]], None], **__: object
    ) -> Any:
        self.released = released
        if self._late:
            await asyncio.Event().wait()
        released(PAGES)
        raise PeerGone("prefill", "killed")

    def give_up(self, room: Room, reason: str) -> None:
        """It is cancelled next."""


async def test_pages_of_a_failed_room_are_free_when_the_last_rank_let_go_of_them() -> None:
    back: list[tuple[int, ...]] = []
    ranks = [Breaks(late=False), Breaks(late=True), Breaks(late=True)]
    team = Team(ranks, Stages([], lambda _: None))
    with pytest.raises(RoomFailed, match="killed"):
        await team.pull(
            TRIPLE, PAGES, 32, deadline_s=9.0, released=lambda pages: back.append(tuple(pages))
        )
    for rank in ranks[1:]:
        await asyncio.sleep(0)
        assert back == [], "late bytes may still hit them"
        rank.released(PAGES)
    assert back == [PAGES]

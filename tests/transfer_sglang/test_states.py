"""States of SGLang's transfers: what grows, what is final, and which room a row proves."""

from __future__ import annotations

import pytest

from kvplane.transfer.sglang import Poll, Row, judge_row, later, of_room, rank_number
from kvplane.vocabulary import MAX_ROOM


@pytest.mark.parametrize(
    ("row", "room", "says"),
    [
        (71, 71, Row.OURS), (72, 71, Row.FOREIGN), (0, 71, Row.NOT_LANDED),
        (0, 0, Row.NOT_LANDED), (71, 0, Row.FOREIGN), (MAX_ROOM, MAX_ROOM, Row.OURS),
    ],
)  # fmt: skip
def test_a_row_proves_its_room(row: int, room: int, says: Row) -> None:
    assert judge_row(row, room) is says


def test_room_0_never_passes() -> None:
    assert all(judge_row(row, 0) is not Row.OURS for row in (0, 1, MAX_ROOM))


def test_the_state_of_one_rank_only_grows_and_failed_is_final() -> None:
    assert later(Poll.TRANSFERRING, Poll.WAITING_FOR_INPUT) is Poll.TRANSFERRING
    assert later(Poll.WAITING_FOR_INPUT, Poll.SUCCESS) is Poll.SUCCESS
    for said in Poll:
        assert later(Poll.FAILED, said) is Poll.FAILED
        assert later(said, Poll.FAILED) is Poll.FAILED


def test_only_a_beginning_opens_a_room() -> None:
    opens = {said for said in Poll if later(None, said) is not None}
    assert opens == {Poll.BOOTSTRAPPING, Poll.WAITING_FOR_INPUT}


def test_the_slowest_rank_counts_and_one_failure_fails_the_room() -> None:
    assert of_room([Poll.SUCCESS, Poll.TRANSFERRING]) is Poll.TRANSFERRING
    assert of_room([Poll.SUCCESS, Poll.FAILED]) is Poll.FAILED
    assert of_room([Poll.SUCCESS]) is Poll.SUCCESS


def test_every_rank_signs_differently() -> None:
    ranks = [(tp, pp, cp) for tp in range(4) for pp in range(2) for cp in range(3)]
    assert sorted(rank_number(*rank, 2, 3) for rank in ranks) == list(range(24))

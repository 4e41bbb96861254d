"""Drift: what counts as wrong, as an alarm, as silence; and when each is over."""

from __future__ import annotations

import pytest

from kvplane.router.drift import Compared, Stream, Window, compared, error
from kvplane.router.settings import DriftSettings
from kvplane.router.suspicions import Cause, Suspicion

SETTINGS = DriftSettings()


def window(*pairs: tuple[int, int], at: float = 0.0, settings: DriftSettings = SETTINGS) -> Window:
    """A window of (foretold, found) pairs."""
    made = Window(settings)
    for predicted, actual in pairs:
        made.add(compared(predicted, predicted, actual, at))
    return made


@pytest.mark.parametrize(
    ("predicted", "later", "actual", "over", "under"),
    [
        (96, 96, 96, 0, 0),
        (96, 96, 0, 96, 0),
        (96, 96, 64, 32, 0),
        (0, 0, 96, 0, 96),
        (0, 96, 96, 0, 0),  # the news was on its way when it was routed
        (0, 96, 48, 0, 0),
        (0, 48, 96, 0, 48),
        (96, 0, 0, 0, 0),  # so was the eviction
        (96, 48, 32, 16, 0),
        (0, 0, 0, 0, 0),
    ],
)
def test_what_lies_between_before_and_after_is_right(
    predicted: int, later: int, actual: int, over: int, under: int
) -> None:
    one = compared(predicted, later, actual, 0.0)
    assert (one.over, one.under) == (over, under)
    assert one.right is (over == under == 0)
    assert one.outcome == ("over" if over else "under" if under else "equal")


def test_the_error_is_the_share_of_tokens_that_were_wrong() -> None:
    assert error([]) == 0
    assert error([compared(0, 0, 0, 0.0)]) == 0
    assert error([compared(96, 96, 96, 0.0), compared(96, 96, 0, 0.0)]) == 0.5
    assert window((64, 0), (0, 32), (32, 32)).errors(0.0) == (0.5, 0.25)


def test_one_miss_is_no_alarm_however_large() -> None:
    """An idle engine tells of its reset with the next request: that one is wrong, and heals."""
    made = window(*[(96, 96)] * 9, (100_000, 0))
    assert not made.alarmed(0.0)
    assert not window((100_000, 0), (16, 16), (16, 16), (16, 16), (16, 16)).alarmed(0.0)


def test_an_alarm_needs_enough_comparisons() -> None:
    made = window(*[(96, 0)] * 4)
    assert not made.alarmed(0.0)
    made.add(compared(96, 96, 0, 0.0))
    assert made.alarmed(0.0)


@pytest.mark.parametrize(
    ("wrong", "alarmed"),
    [((96, 80), False), ((96, 0), True), ((0, 96), True)],
)
def test_small_errors_are_no_alarm_and_large_ones_are(
    wrong: tuple[int, int], alarmed: bool
) -> None:
    assert window(*[(96, 96)] * 5, *[wrong] * 5).alarmed(0.0) is alarmed


def test_what_was_right_long_ago_does_not_hide_what_is_wrong_now() -> None:
    assert window(*[(960, 960)] * 40, *[(96, 0)] * 10).alarmed(0.0)


def test_an_alarm_is_about_the_late_ones_alone() -> None:
    made = window(*[(64, 0)] * 20, *[(96, 0), (96, 96)] * 5)
    assert [one.predicted for one in made.wrong(0.0)] == [96] * 5


def test_the_alarm_ends_when_the_last_few_agree_and_does_not_come_back_by_itself() -> None:
    made = window(*[(96, 0)] * 6)
    assert made.alarmed(0.0)
    for _ in range(4):
        made.add(compared(96, 96, 96, 0.0))
        assert made.alarmed(0.0)
    made.add(compared(96, 96, 96, 0.0))
    assert not made.alarmed(0.0)
    made.add(compared(96, 96, 0, 0.0))
    assert not made.alarmed(0.0)
    assert len(made.wrong(0.0)) == 1


def test_requests_of_which_nothing_was_foretold_or_found_prove_nothing() -> None:
    made = window(*[(96, 0)] * 6)
    assert made.alarmed(0.0)
    for _ in range(20):
        made.add(compared(0, 0, 0, 0.0))
    assert made.alarmed(0.0)
    assert not window(*[(96, 0)] * 4, *[(0, 0)] * 20).alarmed(0.0)


def test_the_window_is_bounded_in_number_and_time() -> None:
    made = window(*[(96, 0)] * 200)
    assert len(made.recent(0.0)) == SETTINGS.window
    assert made.alarmed(599.0)
    assert not made.alarmed(600.0)
    assert made.recent(600.0) == [] and made.errors(600.0) == (0, 0)


def test_right_ones_are_looked_at_while_something_was_wrong_lately() -> None:
    assert not window((96, 96)).uneasy(0.0)
    made = window((96, 0), (96, 96))
    assert made.uneasy(599.0) and not made.uneasy(600.0)
    told = frozenset({Suspicion(Cause.IDENTITY, "p2")})
    made.add(Compared(0.0, 0, 0, suspicions=told))
    assert made.recent(0.0)[-1].suspicions == told


# Late news --------------------------------------------------------------------------------------


def test_what_was_wrong_since_the_news_was_late_is_forgotten_and_what_was_right_is_not() -> None:
    made = window(*[(96, 96)] * 3, *[(96, 0)] * 3, at=10.0)
    for _ in range(3):
        made.add(compared(96, 96, 0, 20.0))
    assert made.alarmed(20.0)
    made.mended(30.0)
    assert made.alarmed(30.0), "nothing was wrong since"
    made.mended(20.0)
    assert made.alarmed(30.0), "three are left, and enough"
    made.mended(10.0)
    assert not made.alarmed(30.0)
    assert [one.right for one in made.recent(30.0)] == [True] * 3


def test_after_it_was_mended_an_alarm_needs_as_much_as_the_first() -> None:
    made = window(*[(96, 0)] * 6)
    assert made.alarmed(0.0)
    made.mended(0.0)
    for count in range(5):
        assert not made.alarmed(1.0), count
        made.add(compared(96, 96, 0, 1.0))
    assert made.alarmed(1.0)


def test_an_alarm_rests_where_nothing_wrong_came_until_the_next_wrong_one() -> None:
    made = window(*[(96, 0)] * 6)
    assert made.alarmed(0.0)
    assert not made.rests(14.9, whole=True)
    assert not made.rests(60.0, whole=False), "nobody could have heard of it"
    assert made.rests(60.0, whole=True) and made.resting
    assert made.rests(61.0, whole=False), "what rests is woken by nothing else"
    made.add(compared(96, 96, 96, 62.0))
    assert made.rests(62.0, whole=True)
    made.add(compared(96, 96, 0, 63.0))
    assert made.alarmed(63.0) and not made.rests(63.0, whole=True) and not made.resting
    assert len(made.wrong(63.0)) == 7, "what is remembered stays"


# Streams ----------------------------------------------------------------------------------------


def served(stream: Stream, count: int, last: int | None = 7, first: int = 0) -> None:
    for prompt in range(first, first + count):
        stream.served(last, last, prompt, 0.0)


def test_a_stream_is_silent_when_enough_is_owed_for_long_enough() -> None:
    stream = Stream(SETTINGS)
    served(stream, 2)
    assert stream.silent_s(1000.0) == 0
    served(stream, 1, first=2)
    assert stream.silent_s(4.9) == 0
    assert stream.silent_s(5.0) == 5.0
    served(stream, 97, first=3)
    assert (stream.owed, stream.silent_s(60.0)) == (100, 60.0)


def test_a_stream_is_silent_since_enough_was_owed_not_since_the_last_request() -> None:
    stream = Stream(SETTINGS)
    for prompt in range(100):
        stream.served(None, None, prompt, float(prompt))
    assert stream.silent_s(99.0) == 97.0  # the third came at 2.0


@pytest.mark.parametrize("before", [None, 7])
def test_any_batch_pays_everything(before: int | None) -> None:
    stream = Stream(SETTINGS)
    served(stream, 100, last=before)
    assert stream.silent_s(10.0)
    stream.heard(8)
    assert (stream.owed, stream.silent_s(100.0)) == (0, 0)


def test_a_batch_that_came_while_the_request_was_served_pays_it() -> None:
    stream = Stream(SETTINGS)
    for prompt in range(10):  # side by side: one batch told of all of them
        stream.served(6, 7, prompt, 0.0)
    assert stream.owed == 0


def test_the_same_prompt_again_stores_nothing_new() -> None:
    stream = Stream(SETTINGS)
    for _ in range(100):
        served(stream, 2)
    assert stream.owed == 2 and stream.silent_s(1000.0) == 0


def test_what_could_not_have_been_heard_is_forgiven() -> None:
    stream = Stream(SETTINGS)
    served(stream, 5)
    stream.forgive()
    assert stream.silent_s(1000.0) == 0


def test_what_a_stream_owes_is_bounded() -> None:
    stream = Stream(SETTINGS)
    served(stream, 5000)
    assert stream.owed == 1024

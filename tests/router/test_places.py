"""Places: given out by turns between keys, never too many, and every one comes back."""

from __future__ import annotations

import random

import pytest

from kvplane.router.places import Places, Turn, Waiting


def filled(most: int, queue: int) -> Places:
    """All places taken, nobody waits."""
    places = Places(most, queue)
    for _ in range(most):
        assert places.free
        places.take()
    return places


def join(places: Places, line: str) -> Waiting:
    found = places.join(line)
    assert found is not None
    return found


def test_keys_take_turns_and_within_one_the_first_is_first() -> None:
    places = filled(1, 10)
    waiting = [join(places, line) for line in ("a", "a", "a", "b", "c", "b")]
    order = []
    for _ in range(6):
        places.leave()
        (called,) = [at for at, one in enumerate(waiting) if one.turn is Turn.CALLED]
        order.append(called)
        waiting[called].turn = Turn.PUSHED_OUT  # seen
    assert order == [0, 3, 4, 1, 5, 2]
    places.leave()
    assert (places.running, places.waiting) == (0, 0)


def test_a_place_goes_to_who_waits_and_not_to_who_comes() -> None:
    places = filled(2, 2)
    one = join(places, "a")
    places.leave()
    assert one.turn is Turn.CALLED
    assert not places.free


def test_a_full_line_turns_away_the_newest_of_the_longest() -> None:
    places = filled(1, 3)
    mine = [join(places, "a") for _ in range(3)]
    assert places.full("a") and not places.full("b")
    assert places.join("a") is None
    rung = []
    mine[2].ring = lambda: rung.append("out")
    join(places, "b")
    assert [one.turn for one in mine] == [Turn.WAITING, Turn.WAITING, Turn.PUSHED_OUT]
    assert rung == ["out"] and places.waiting == 3
    assert places.full("b")  # nobody has more than a fair share now
    assert places.join("b") is None


def test_without_room_to_wait_nobody_waits_and_without_a_limit_nobody_has_to() -> None:
    assert filled(1, 0).join("a") is None
    places = Places(-1, 0)
    for _ in range(1000):
        assert places.free
        places.take()


def test_who_withdraws_leaves_no_trace_and_gives_back_a_place_he_was_given() -> None:
    places = filled(1, 5)
    one, two = join(places, "a"), join(places, "b")
    places.withdraw(two)
    assert places.waiting == 1
    places.leave()
    assert one.turn is Turn.CALLED
    places.withdraw(one)  # he left before he noticed
    assert (places.running, places.waiting, places.free) == (0, 0, True)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_places_are_neither_lost_nor_doubled(seed: int) -> None:
    """Against a plain count of who runs and who waits."""
    chance = random.Random(seed)
    most, queue = chance.randint(1, 5), chance.randint(0, 6)
    places, running, waiting = Places(most, queue), 0, list[Waiting]()
    for _ in range(3000):
        what = chance.random()
        if what < 0.5:
            if places.free:
                assert not waiting
                places.take()
                running += 1
            else:
                line = chance.choice("abc")
                full, one = places.full(line), places.join(line)
                assert full == (one is None)
                waiting += [one] if one else []
        elif what < 0.8 and running:
            running -= 1
            places.leave()
        elif waiting:
            one = waiting.pop(chance.randrange(len(waiting)))
            places.withdraw(one)
        called = [one for one in waiting if one.turn is Turn.CALLED]
        running += len(called)
        waiting = [one for one in waiting if one.turn is Turn.WAITING]
        assert (places.running, places.waiting) == (running, len(waiting))
        assert running <= most and len(waiting) <= queue
        assert not waiting or running == most

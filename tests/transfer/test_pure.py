"""The small pure parts: session, quarantine, regions, tamper, ended rooms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.transfer import PageOut, Region, drop_last, flip_byte, swap_pages
from kvplane.transfer.errors import PrefillFailed, Refused
from kvplane.transfer.gathering import Ended
from kvplane.transfer.quarantine import Quarantine
from kvplane.transfer.regions import Regions, page_sum, runs
from kvplane.transfer.session import FINAL, NEXT, Happened, State, step
from kvplane.vocabulary import Room


def test_every_state_but_the_final_ones_can_fail() -> None:
    for state in set(State) - FINAL:
        assert step(state, Happened.FAILED) is State.FAILED
    for state in FINAL:
        assert step(state, Happened.FAILED) is state, "late failures change nothing"
        assert not any(before is state for before, _ in NEXT)


def test_a_room_cannot_skip_being_bound() -> None:
    with pytest.raises(AssertionError, match="Bootstrapping"):
        step(State.BOOTSTRAPPING, Happened.FIRST_PAGE)


def test_success_is_reached_through_the_states() -> None:
    state = State.BOOTSTRAPPING
    for happened in (Happened.BOUND, Happened.FIRST_PAGE, Happened.FIRST_PAGE, Happened.AGREED):
        state = step(state, happened)
    assert state is State.SUCCESS


def test_pages_stay_in_quarantine_until_released_once() -> None:
    quarantine = Quarantine()
    quarantine.hold(1, [4, 5])
    quarantine.hold(2, [6])
    assert len(quarantine) == 3 and 5 in quarantine and 7 not in quarantine
    assert quarantine.release(1) == (4, 5)
    assert quarantine.release(1) == ()
    assert len(quarantine) == 1


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_say_the_same_pages_in_the_same_order(pages: list[int]) -> None:
    assert [first + n for first, count in runs(pages) for n in range(count)] == pages
    borders = list(zip(runs(pages), runs(pages)[1:], strict=False))
    assert all(a[0] + a[1] != b[0] for a, b in borders), "neighbours are merged"


def two_layers() -> tuple[list[np.ndarray], Regions]:
    random = np.random.default_rng(3)
    layers = [random.integers(0, 255, (10, 8), dtype=np.uint8) for _ in range(2)]
    return layers, Regions([Region.of(layer) for layer in layers])


@given(st.lists(st.integers(0, 9), unique=True, max_size=10))
def test_gathering_is_region_by_region_and_merges_neighbours(sources: list[int]) -> None:
    layers, regions = two_layers()
    pieces = list(regions.gather(regions.out(sources, range(len(sources)))))
    wanted = b"".join(layer[source].tobytes() for layer in layers for source in sources)
    assert b"".join(pieces) == wanted
    assert len(pieces) == 2 * len(runs(sources))


def test_a_page_that_is_not_ours_any_more_is_sent_as_it_is() -> None:
    _, regions = two_layers()
    out = flip_byte(regions.out([4, 5, 6], [0, 1, 2]), 16 + 3)
    assert len(list(regions.gather(out))) == 6
    sums = [page_sum(page.parts) for page in out]
    assert [a == b for a, b in zip(sums, regions.sums([4, 5, 6]), strict=True)] == [
        True,
        False,
        True,
    ]


def test_the_sum_of_a_page_covers_every_layer_in_order() -> None:
    layers, regions = two_layers()
    before = regions.sums([7])
    layers[1][7, 3] ^= 1
    assert regions.sums([7]) != before
    layers[1][7, 3] ^= 1
    layers[0][7], layers[1][7] = layers[1][7].copy(), layers[0][7].copy()
    assert regions.sums([7]) != before


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4))[:, ::2], np.zeros(0), np.float64(1), [1, 2], b"bytes"]
)
def test_memory_that_cannot_be_moved_is_refused(array) -> None:
    with pytest.raises(ValueError, match="region"):
        Region.of(array)


def test_read_only_memory_is_refused() -> None:
    array = np.zeros((4, 4))
    array.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        Region.of(array)


def test_regions_have_equally_many_items() -> None:
    with pytest.raises(ValueError, match="equal length"):
        Regions([Region.of(np.zeros((2, 4))), Region.of(np.zeros((3, 4)))])


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flip_changes_one_bit_of_one_page_and_not_the_memory(at: int, bit: int) -> None:
    _, regions = two_layers()
    pages = regions.out([1, 2, 3], [0, 1, 2])
    before = b"".join(part for page in pages for part in page.parts)
    after = b"".join(part for page in flip_byte(pages, at, bit) for part in page.parts)
    different = int.from_bytes(before, "big") ^ int.from_bytes(after, "big")
    assert different.bit_count() == 1
    assert b"".join(part for page in pages for part in page.parts) == before


def test_swapping_keeps_the_targets_and_dropping_drops_one() -> None:
    _, regions = two_layers()
    pages = regions.out([1, 2, 3], [0, 1, 2])
    swapped = swap_pages(pages)
    assert [page.page for page in swapped] == [0, 1, 2]
    assert [page.source for page in swapped] == [3, 2, 1]
    assert [page.page for page in drop_last(pages)] == [0, 1]
    assert swap_pages([PageOut(0, ())]) == [PageOut(0, ())]


def test_rooms_that_are_over_are_remembered_for_a_time_and_in_a_number() -> None:
    ended = Ended(most=3, keep_s=10)
    ended.add(Room(1), PrefillFailed("p", 1, "broken"), now=0)
    ended.add(Room(1), None, now=1)
    ended.add(Room(2), None, now=5)
    assert isinstance(ended.find(Room(1), 9), PrefillFailed), "the first end counts"
    assert isinstance(ended.find(Room(2), 9), Refused)
    assert ended.find(Room(1), 10) is None
    for room in (3, 4, 5):
        ended.add(Room(room), None, now=11)
    assert ended.find(Room(2), 11) is None and len(ended) == 3

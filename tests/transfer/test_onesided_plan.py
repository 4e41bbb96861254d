"""What a one-sided sender moves, registers and stages: all of it pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.transfer import Refused, Region, flip_byte
from kvplane.transfer.backends.nixl_transports import BY_ITSELF, SAFE, by_itself
from kvplane.transfer.backends.onesided_plan import (
    Grant,
    Move,
    Reach,
    Span,
    Target,
    batches,
    merged,
    moves,
    spans_of,
)
from kvplane.transfer.backends.onesided_slots import ALIGN, Slots, Staging
from kvplane.transfer.regions import Regions

SIZES = (32, 64)  # bytes of one page in two regions


def two() -> Regions:
    return Regions([Region.of(np.zeros((10, size), np.uint8)) for size in SIZES])


def target(*spans: Span) -> Target:
    return Target(Reach("s", 1, spans), Grant(1, 9, 9), spans, SIZES)


def far() -> Target:
    return target(Span(1_000_000, 320), Span(2_000_000, 640))


def no_stage(data: memoryview) -> int:
    raise AssertionError("nothing is staged")


def test_pages_that_follow_each_other_on_both_sides_are_one_move() -> None:
    mine = two()
    first, second = (region.address for region in mine)
    made = moves(mine, far(), mine.out([4, 5, 9, 6], [7, 8, 2, 3]), no_stage)
    assert made == [
        Move(first + 4 * 32, 1_000_000 + 7 * 32, 64),
        Move(first + 9 * 32, 1_000_000 + 2 * 32, 32),
        Move(first + 6 * 32, 1_000_000 + 3 * 32, 32),
        Move(second + 4 * 64, 2_000_000 + 7 * 64, 128),
        Move(second + 9 * 64, 2_000_000 + 2 * 64, 64),
        Move(second + 6 * 64, 2_000_000 + 3 * 64, 64),
    ]


pairs = st.permutations(range(10)).flatmap(
    lambda order: st.tuples(st.just(order), st.permutations(range(10)), st.integers(0, 10))
)


@given(pairs)
def test_whatever_is_merged_every_byte_goes_where_it_belongs(
    case: tuple[list[int], list[int], int],
) -> None:
    sources, pages, count = case[0][: case[2]], case[1][: case[2]], case[2]
    mine = two()
    made = moves(mine, far(), mine.out(sources, pages), no_stage)
    went = {
        move.remote + at: move.local + at for move in made for at in range(move.size)
    }  # byte -> where it came from
    assert len(went) == sum(move.size for move in made) == count * sum(SIZES)
    for region, base, size in zip(mine, (1_000_000, 2_000_000), SIZES, strict=True):
        for source, page in zip(sources, pages, strict=True):
            assert went[base + page * size] == region.address + source * size


def test_bytes_that_lie_nowhere_registered_are_staged() -> None:
    mine, slots = two(), Slots(1024)
    out = flip_byte(mine.out([4, 5], [4, 5]), at=0)
    with Staging(slots, "peer") as staging:
        made = moves(mine, far(), out, staging.put)
        assert [move.size for move in made] == [32, 32, 64, 64]
        assert slots.span.address <= made[0].local < slots.span.address + 1024
        assert len(slots) == 2
    assert len(slots) == 0


def test_staging_has_an_end_and_gives_back_what_it_took() -> None:
    slots = Slots(128)
    with pytest.raises(Refused, match="no room to stage 200 bytes"), Staging(slots, "p") as staging:
        staging.put(memoryview(b"x" * 100))
        staging.put(memoryview(b"x" * 200))
    assert len(slots) == 0


def test_a_batch_is_of_one_kind_of_memory_and_not_too_long() -> None:
    kinds = ["cpu"] * 5 + ["cuda:0"] * 2 + ["cuda:1"]
    made = [Move(at, at, 1, kind) for at, kind in enumerate(kinds)]
    assert [len(batch) for batch in batches(made, 3)] == [3, 2, 2, 1]
    assert [move for batch in batches(made, 3) for move in batch] == made


@pytest.mark.parametrize(
    ("spans", "registered"),
    [
        ([(0, 10), (10, 5)], [(0, 15)]),  # neighbours of the host
        ([(10, 5), (0, 10)], [(0, 15)]),
        ([(0, 10), (0, 10)], [(0, 10)]),  # twice
        ([(0, 10), (4, 2)], [(0, 10)]),  # inside
        ([(0, 10), (5, 10)], [(0, 15)]),  # overlapping
        ([(0, 10), (11, 5)], [(0, 10), (11, 5)]),
    ],
)
def test_what_is_registered_overlaps_nowhere(
    spans: list[tuple[int, int]], registered: list[tuple[int, int]]
) -> None:
    assert merged(Span(*span) for span in spans) == [Span(*span) for span in registered]


def test_neighbours_on_a_device_stay_two_they_may_be_two_allocations() -> None:
    spans = [Span(0, 8, "cuda:0"), Span(8, 8, "cuda:0"), Span(12, 8, "cuda:0"), Span(0, 8)]
    assert merged(spans) == [Span(0, 8), Span(0, 8, "cuda:0"), Span(8, 12, "cuda:0")]


def test_regions_tell_where_they_lie() -> None:
    array = np.zeros((4, 8), np.float16)
    (span,) = spans_of(Regions([Region.of(array)]))
    assert span == Span(array.ctypes.data, 64, "cpu")


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=60))
def test_slots_never_overlap_and_their_room_comes_back(steps: list[tuple[int, int]]) -> None:
    slots, held = Slots(1024), []
    for size, which in steps:
        if which < len(held) and which % 2:
            gone = held.pop(which)
            slots.give(gone)
            slots.give(gone)
        slot = slots.take(size)
        if slot is not None:
            assert slot.address % ALIGN == slots.span.address % ALIGN
            assert bytes(slot.view) == b"\xff" * size
            slot.view[:] = b"\0" * size
            held.append(slot)
    places = sorted((slot.address, slot.address + len(slot.view)) for slot in held)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert all(slots.span.address <= start for start, _ in places)
    assert all(end <= slots.span.address + 1024 for _, end in places)
    for slot in held:
        slots.give(slot)
    assert slots.take(1024) is not None


@pytest.mark.parametrize(
    ("tls", "wrong"),
    [
        (SAFE, ()),
        ("tcp", ()),
        ("tcp,sysv,posix", ()),
        ("^cma", ("xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc")),
        ("^sm,cuda,rocm,ze", ()),
        ("all", BY_ITSELF),
        ("", BY_ITSELF),
        ("tcp,cma", ("cma",)),
        ("tcp, cuda", ("cuda_ipc",)),
        ("sm,tcp", ("cma", "xpmem", "knem")),
        ("rc,cuda_copy", ()),
    ],
)
def test_transports_that_write_by_themselves_are_seen(tls: str, wrong: tuple[str, ...]) -> None:
    assert by_itself(tls) == wrong

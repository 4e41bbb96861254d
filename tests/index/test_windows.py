"""How much is usable: the rule of every kind of group, against one that looks at every block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.groups import SIZE, naive_usable

from kvplane.index.windows import usable
from kvplane.vocabulary import Group, GroupKind

FULL, WINDOW, CHUNK, STATE = (
    GroupKind.FULL,
    GroupKind.WINDOW,
    GroupKind.CHUNK,
    GroupKind.STATE,
)


@st.composite
def some_groups(draw: st.DrawFn) -> list[tuple[Group, set[int]]]:
    made = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(GroupKind))
        tokens = draw(st.integers(1, 150)) if kind in (WINDOW, CHUNK) else 0
        size = draw(st.sampled_from([0, SIZE, 2 * SIZE, 3 * SIZE]))
        missing = draw(st.sets(st.integers(0, 23), max_size=8))
        made.append((Group(number, kind, tokens, size), set(range(24)) - missing))
    return made


@settings(max_examples=600, deadline=None)
@given(depth=st.integers(0, 24), groups=some_groups(), tiers=st.integers(1, 3))
def test_usable_is_the_greatest_depth_that_every_group_accepts(
    depth: int, groups: list[tuple[Group, set[int]]], tiers: int
) -> None:
    asked = range(24)  # block at i is named i
    told = [
        (group, [{at for at in held if at % tiers == tier} for tier in range(tiers)])
        for group, held in groups
    ]
    assert usable(asked, depth, SIZE, told) == naive_usable(depth, groups)


@pytest.mark.parametrize(
    ("kind", "tokens", "size", "held", "expected"),
    [
        (FULL, 0, 0, "012345", 6),
        (FULL, 0, 0, "01.345", 2),
        (WINDOW, 33, 0, "....45", 6),  # the last two blocks are enough
        (WINDOW, 34, 0, "....45", 0),  # three are wanted
        (WINDOW, 34, 0, "01..45", 2),  # all from 0 where n is smaller than the window
        (WINDOW, 33, 0, ".12..5", 3),
        (WINDOW, 1, 0, "......", 6),  # a token that sees only itself
        (WINDOW, 0, 0, "012.45", 3),  # a window that nobody told: every block may be needed
        (STATE, 0, 0, "..2.4.", 5),
        (STATE, 0, 0, "......", 0),
        (CHUNK, 64, 0, "....45", 6),  # chunks of four: 4 and 5 since the last
        (CHUNK, 64, 0, ".....5", 4),  # at a border nothing is needed
        (CHUNK, 64, 0, "0.2.45", 6),
        (CHUNK, 64, 0, "0.2..5", 4),
        (CHUNK, 0, 0, "012.45", 3),
        (FULL, 0, 32, ".1.3.5", 6),  # twice the size: every second block
        (FULL, 0, 32, ".1...5", 2),
        (WINDOW, 33, 32, ".....5", 6),
        (STATE, 0, 64, "...3..", 4),  # only a multiple of four is usable
        (FULL, 0, 24, "......", 6),  # no multiple of ours: it cannot be judged
    ],
)
def test_what_each_kind_of_group_needs(
    kind: GroupKind, tokens: int, size: int, held: str, expected: int
) -> None:
    group = Group(1, kind, tokens, size)
    there = {int(at) for at in held if at != "."}
    assert usable(range(6), 6, SIZE, [(group, [there])]) == expected


def test_groups_lower_one_another_until_nothing_changes() -> None:
    window = Group(1, WINDOW, 33), [{1, 2, 4, 5}]  # accepts 6, then 3
    state = Group(2, STATE), [{2, 4}]  # accepts 5, then 3
    assert usable(range(6), 6, SIZE, [window, state]) == 3
    assert usable(range(6), 6, SIZE, [state, window]) == 3


def test_the_recorded_hybrid_of_vllm() -> None:
    """Four full-attention blocks of 32 tokens are there, the window's last is not: 96 tokens."""
    window = Group(0, WINDOW, 32), [{0, 1, 2}]
    assert usable(range(4), 4, 32, [window]) * 32 == 96

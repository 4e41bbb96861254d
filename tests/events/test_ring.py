"""The ring: what it keeps, and that every cursor finds its place or none."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.events import ring as ring_module
from kvplane.events.ring import Ring
from kvplane.index import Entry
from kvplane.vocabulary import BlockHash, Change, Cursor, Epoch, Pod, Stored, Tier, Worker

MOST = 10**9


class Shards:
    """Cursors `3_0_7`: how many entries of each shard were seen; a worker's shard is its name.

    A mark may be of another history: `3x`."""

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        pairs = zip(cursor.split("_"), goal.split("_"), strict=True)
        return all(int(mine.rstrip("x")) >= int(wanted.rstrip("x")) for mine, wanted in pairs)

    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor:
        pairs = enumerate(zip(cursor.split("_"), fresh.split("_"), strict=True))
        return Cursor("_".join(new if at in shards else old for at, (old, new) in pairs))

    def shard_of(self, worker: Worker) -> int:
        return int(worker.pod)


def entry(cursor: str, shard: int, number: int, blocks: int = 1) -> Entry:
    worker = Worker(Pod(str(shard)))
    names = tuple(BlockHash(number * 1000 + at) for at in range(blocks))
    changes: tuple[Change, ...] = (Stored(worker, Epoch(1), Tier.GPU, None, names, 16),)
    return Entry(Cursor(cursor), changes, worker, Epoch(1), number, float(number))


def told(order: Sequence[int], shards: int) -> list[Entry]:
    """Entries in this order of shards; each knows the marks its reader has after it."""
    marks, found = [0] * shards, []
    for shard in order:
        marks[shard] += 1
        found.append(entry("_".join(map(str, marks)), shard, marks[shard]))
    return found


def filled(entries: Sequence[Entry], base: str, most: int = MOST, most_bytes: int = MOST) -> Ring:
    ring = Ring(Shards(), most, most_bytes)
    ring.begin(Cursor(base))
    for one in entries:
        ring.add(one)
    return ring


def read(ring: Ring, cursor: str) -> list[tuple[str, str, int]] | None:
    """(id, worker, sequence) of all that a reader at this cursor is told; None: no place."""
    place = ring.place(Cursor(cursor))
    if place is None:
        return None
    found = []
    while place.number < ring.end:
        event = ring.take(place).decode()
        if event:
            head, name, data, *_ = event.split("\n")
            body: dict[str, Any] = json.loads(data.removeprefix("data: "))
            assert (
                name == "event: changes"
                and head == f"id: {body['cursor']}"
                and event[-2:] == "\n\n"
            )
            found.append((body["cursor"], body["worker"], body["sequence"]))
    assert place.at == (found[-1][0] if found else cursor)
    return found


def test_a_cursor_of_ours_goes_on_with_the_next_entry() -> None:
    ring = filled(told([0, 0, 0], 1), "0")
    assert read(ring, "0") == [("1", "0", 1), ("2", "0", 2), ("3", "0", 3)]
    assert read(ring, "2") == [("3", "0", 3)]
    assert read(ring, "3") == []


def test_the_oldest_make_room_by_number_and_by_bytes_and_the_newest_stays() -> None:
    ring = filled(told([0] * 9, 1), "0", most=4)
    assert (len(ring), ring.base, ring.head) == (4, "5", "9")
    assert read(ring, "4") is None and read(ring, "5") == [(str(n), "0", n) for n in range(6, 10)]
    large = [entry(str(n), 0, n, blocks=1000) for n in range(1, 9)]
    ring = filled(large, "0", most_bytes=100_000)
    assert len(ring) == 2 and ring.bytes <= 100_000 and ring.head == "8"
    ring.add(entry("9", 0, 9, blocks=100_000))
    assert len(ring) == 1 and ring.base == "8"


def test_the_room_an_entry_is_counted_with_is_more_than_it_takes_as_text() -> None:
    for blocks in (0, 1, 10_000):
        kept = ring_module.Kept(entry("1", 0, 1, blocks))
        assert len(kept.event()) <= kept.bytes


def test_a_cursor_that_is_ahead_has_to_wait() -> None:
    ring = filled(told([0, 1], 2), "0_0")
    assert ring.ahead(Cursor("1_2")) and ring.place(Cursor("1_2")) is None
    assert not ring.ahead(Cursor("1_1")) and not ring.ahead(Cursor("0_1"))


def test_a_new_beginning_forgets_and_says_so() -> None:
    ring = filled(told([0, 0], 1), "0")
    life = ring.life
    ring.begin(Cursor("50"), "cut")
    assert ring.life != life and ring.why == "cut" and len(ring) == 0 == ring.bytes
    assert ring.place(Cursor("2")) is None and read(ring, "50") == []


def test_a_mark_of_another_history_has_no_place() -> None:
    ring = filled(told([0, 1, 0, 1], 2), "0_0")
    assert read(ring, "2_1") == [("2_2", "1", 2)]
    for foreign in ("2x_1", "2_1x", "1x_0", "0_1x", "1x_1x"):
        assert ring.place(Cursor(foreign)) is None, foreign


def test_an_entry_becomes_text_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Entry] = []
    encoded = ring_module.encoded
    monkeypatch.setattr(ring_module, "encoded", lambda one: made.append(one) or encoded(one))
    ring = filled(told([0, 1] * 10, 2), "0_0")
    for cursor in ("0_0", "1_0", "0_1", "5_5"):
        read(ring, cursor)
    assert len(made) == 20


@given(st.data())
def test_wherever_a_reader_was_it_is_told_each_missing_entry_once_in_order(
    data: st.DataObject,
) -> None:
    """Two processes saw the shards in different orders; a cursor of one is good at the other."""
    shards = data.draw(st.integers(1, 3))
    order = data.draw(st.lists(st.integers(0, shards - 1), max_size=14))
    counts = [order.count(shard) for shard in range(shards)]
    seen = [data.draw(st.integers(0, count)) for count in counts]
    ring = filled(told(order, shards), "_".join("0" * shards), most=data.draw(st.integers(1, 20)))
    said = read(ring, "_".join(map(str, seen)))
    base = [int(mark) for mark in ring.base.split("_")]
    if any(mine < first for mine, first in zip(seen, base, strict=True)):
        assert said is None  # something it needs is forgotten, or it stands before the base
        return
    assert said is not None
    marks = list(seen)
    for cursor, worker, sequence in said:
        marks[int(worker)] += 1
        assert sequence == marks[int(worker)]
        assert cursor == "_".join(map(str, marks))
    assert marks == counts

"""However an engine says it, the index is the same: bytes in, depths out.

FR-EV-01, 02, 03, 16, 22, 30. Payloads are made here member by member, as engines make them; no
encoder of ours has a part in it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kit.translating import SIZE, Ingest, P, Q, blocks_of, tokens_of

from kvplane.events.dialects import vllm
from kvplane.events.dialects.base import Dialect
from kvplane.index import View
from kvplane.index.question import chains, read

TOKENS = tokens_of(4)
BYTES = [bytes([at]) * 32 for at in range(1, 5)]
WIDE = [2**64 - at for at in range(1, 5)]  # above 2^63
SIGNED = [-at for at in range(1, 5)]
ENGINES = {"bytes": BYTES, "unsigned": WIDE, "signed": SIGNED, "half": [h[:16] for h in BYTES]}


def stored(names: list[Any], tokens: list[int] = TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": None,
        "token_ids": tokens, "block_size": SIZE, **more,
    }  # fmt: skip


def hear(ingest: Ingest, payload: Any, dialect: Dialect | None = None) -> tuple[str, ...]:
    """A batch from its bytes to the view; the names that were told as unknown."""
    decoded = (dialect or vllm.new()).decode(msgspec.msgpack.encode(payload))
    assert not decoded.dropped
    ingest.hear(*decoded.events, ts=decoded.ts)
    return decoded.unknown


# FR-EV-01


@pytest.mark.parametrize("form", ENGINES)
def test_a_chain_is_found_whatever_its_hashes_are_and_one_removal_takes_one_block(
    form: str,
) -> None:
    view = View()
    one, other = Ingest(P, view=view), Ingest(Q, view=view)
    names = ENGINES[form]
    hear(one, [1.0, [stored(names)], 0])
    hear(other, [1.0, [stored(WIDE if form != "unsigned" else BYTES)], 0])
    assert one.depth(TOKENS) == other.depth(TOKENS) == 4
    hear(one, [1.0, [{"type": "BlockRemoved", "block_hashes": names[2:3]}], 0])
    assert (one.depth(TOKENS), other.depth(TOKENS)) == (2, 4)
    assert one.blocks() == {block for at, block in enumerate(blocks_of(TOKENS)) if at != 2}


@pytest.mark.parametrize("form", ENGINES)
def test_a_removal_in_another_form_takes_nothing(form: str) -> None:
    ingest = Ingest()
    hear(ingest, [1.0, [stored(ENGINES[form])], 0])
    for other in ENGINES:
        if other != form:
            hear(ingest, [1.0, [{"type": "BlockRemoved", "block_hashes": ENGINES[other]}], 0])
    assert ingest.depth(TOKENS) == 4


# FR-EV-02, FR-EV-03

ARRAY = ["BlockStored", WIDE, None, TOKENS, SIZE]
LAYOUTS: dict[str, Any] = {
    "array": [1.0, [ARRAY], 0],
    "array of 0.9": [1.0, [[*ARRAY, None]]],
    "map": [1.0, [stored(WIDE)], 0],
    "map, no parent": [1.0, [{k: v for k, v in stored(WIDE).items() if k[0] != "p"}], None],
    "one map": {"ts": 1.0, "events": [stored(WIDE)], "data_parallel_rank": 0},
    "one map of arrays": {"events": [ARRAY]},
    "keys as bytes": [1.0, [{k.encode(): v for k, v in stored(WIDE).items()}]],
    "longer array": [1.0, [[*ARRAY, *[None] * 11, "new", [1]]], 0],
    "wider map": [1.0, [stored(WIDE, colour="red", depth={"a": [1]})], 0],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_index(layout: str) -> None:
    wanted, ingest = Ingest(), Ingest()
    hear(wanted, LAYOUTS["map"])
    unknown = hear(ingest, LAYOUTS[layout])
    assert ingest.table == wanted.table and ingest.depth(TOKENS) == 4
    assert bool(unknown) == (layout in ("longer array", "wider map"))


def test_one_stream_may_change_its_layout_from_batch_to_batch_and_within_one() -> None:
    ingest, dialect = Ingest(), vllm.new()
    told = [
        [1.0, [stored(WIDE[:1], TOKENS[:4])], 0],
        {"ts": 2.0, "events": [["BlockStored", WIDE[1:2], WIDE[0], TOKENS[4:8], SIZE]]},
        [3.0, [["BlockStored", WIDE[2:3], WIDE[1], TOKENS[8:12], SIZE],
               stored(WIDE[3:], TOKENS[12:], parent_block_hash=WIDE[2])]],
    ]  # fmt: skip
    for at, payload in enumerate(told):
        hear(ingest, payload, dialect)
        assert ingest.depth(TOKENS) == (1, 2, 4)[at]


# FR-EV-16


def picture(name: str) -> dict[str, Any]:
    return stored(
        [f"{name}{at}".encode() for at in range(4)],
        extra_keys=[None, [[name, 1]], [[name, -3]], None],
    )


def asked(items: list[dict[str, Any]]) -> Any:
    body = {"model": "m", "token_ids": TOKENS, "items": items}
    return chains(read(msgspec.json.encode(body), 100), {SIZE})[SIZE].blocks


def test_pictures_under_equal_tokens_are_told_apart_and_share_what_is_before_them() -> None:
    view = View()
    ours, theirs = Ingest(P, view=view), Ingest(Q, view=view)
    hear(ours, [1.0, [picture("imgA")], 0])
    hear(theirs, [1.0, [stored(WIDE)], 0])

    def depth(items: list[dict[str, Any]]) -> tuple[int, int]:
        found = view.depths(asked(items), [P, Q])
        return tuple(found[one][0] if one in found else 0 for one in (P, Q))  # type: ignore[return-value]

    where = {"start": 5, "length": 4}
    assert depth([{"id": "imgA", **where}]) == (4, 1)
    assert depth([{"id": "imgB", **where}]) == (1, 1)
    assert depth([]) == (1, 4)
    assert depth([{"id": "imgA", "start": 6, "length": 3}]) == (1, 1)
    hear(ours, [2.0, [{"type": "BlockRemoved", "block_hashes": [b"imgA2"]}], 0])
    assert depth([{"id": "imgA", **where}]) == (2, 1)


# FR-EV-22


def test_pairs_are_indexed_and_only_their_worker_is_approximate() -> None:
    view = View()
    paired, plain = Ingest(P, view=view), Ingest(Q, view=view)
    hear(paired, [1.0, [stored(WIDE, [[t, t + 1] for t in TOKENS])], 0])  # type: ignore[misc]
    hear(plain, [1.0, [stored(WIDE)], 0])
    assert paired.depth(TOKENS) == plain.depth(TOKENS) == 4
    assert "speculative" in paired.translator.caveat and plain.translator.caveat == ""


# FR-EV-30


@pytest.mark.parametrize("clock", [12.5, 1.7e9, 1.7e9 + 86400, float("nan"), float("-inf"), None])
def test_the_engines_clock_changes_nothing(clock: float | None) -> None:
    wanted, ingest = Ingest(), Ingest()
    for at in range(4):
        above = {"parent_block_hash": WIDE[at - 1] if at else None}
        event = stored(WIDE[at : at + 1], TOKENS[at * SIZE : (at + 1) * SIZE], **above)
        hear(wanted, [1.7e9 + at, [event], 0])
        hear(ingest, [clock, [event], 0])
    assert ingest.held == wanted.held and ingest.depth(TOKENS) == 4

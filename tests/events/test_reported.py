"""Small things that were reported of streams: new fields, and removals of many blocks."""

from __future__ import annotations

import msgspec
from kit.batches import SIZE, held, payload, store, tokens
from kit.streams import Publisher, following
from kit.translating import Ingest, removed, stored, tokens_of
from kit.wait import until

from kvplane.vocabulary import Knowledge


async def test_new_fields_are_counted_once_a_kind_and_change_nothing() -> None:
    event = {
        "type": "BlockStored", "block_hashes": [7], "parent_block_hash": None,
        "token_ids": tokens(1), "block_size": SIZE, "colour": "red", "shape": [1],
    }  # fmt: skip
    wide = [
        *("BlockStored", [8], None, tokens(2), SIZE, None, "GPU", None, None, None, None, None),
        *(None, None, None, None, "new", 1),
    ]
    async with Publisher() as engine, following(engine) as followed:
        await followed.knows(Knowledge.EXACT)
        await engine.listened()
        for _ in range(3):
            await engine.publish(msgspec.msgpack.encode([1.0, [event, wide], 0]))
        await followed.at(2)
        assert held(followed, 1, 2) == [1, 2]
        counted = followed.count("unknown_fields_total", kind="BlockStored")
        assert counted == 4, counted  # colour, shape, and two places behind the last known one


def test_one_removal_takes_all_it_names_and_repeats_are_harmless_and_counted() -> None:
    ingest, names = Ingest(), list(range(1, 65))
    ingest.hear(stored(names, tokens_of(64)))
    assert len(ingest.blocks()) == 64
    out = ingest.hear(removed(*names))
    assert not ingest.blocks() and not out.left_out
    assert [len(change.blocks) for change in out.changes] == [64]  # type: ignore[union-attr]
    out = ingest.hear(removed(7, 8), removed(7))
    assert not out.changes and out.left_out == {"unknown-removal": 3}
    out = ingest.hear(removed(999))
    assert not out.changes and out.left_out == {"unknown-removal": 1}


async def test_a_removal_in_one_batch_goes_through_to_the_view() -> None:
    async with Publisher() as engine, following(engine) as followed:
        await followed.knows(Knowledge.EXACT)
        await engine.listened()
        await engine.publish(payload(store(1, last=64)))
        await followed.at(0)
        await engine.publish(payload(removed(*(1000 + at for at in range(64)))))
        await followed.at(1)
        await until(lambda: held(followed, 1) == [])
        facts = followed.view.facts(followed.subscriber.worker)
        assert facts is not None and sum(facts.counts) == 0

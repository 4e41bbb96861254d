"""What makes equal tokens other blocks, and names that hold every delimiter there is."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator

import pytest
from kit.translating import Ingest, P, Q, blocks_of, removed, stored, tokens_of

from kvplane.events import BlocksStored
from kvplane.events.translation import Limits, Translator
from kvplane.index import Batch, MemoryStore, RedisStore, Store, View, chain
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Cleared, ClearReason, Namespace, Pod, Stored, Tier, Worker

TOKENS = tokens_of(4)
BLOCKS = blocks_of(TOKENS)
NAMES = [1, 2, 3, 4]


def two() -> tuple[Ingest, Ingest]:
    """Two pods before one view."""
    view = View()
    return Ingest(P, view=view), Ingest(Q, view=view)


def depths(pods: tuple[Ingest, Ingest], **space: str) -> tuple[int, int]:
    a, b = pods
    return a.depth(TOKENS, **space), b.depth(TOKENS, **space)


def test_unrelated_hashes_of_two_pods_mean_the_same_tokens() -> None:
    a, b = pods = two()
    small = [secrets.randbits(64) for _ in range(4)]
    large = [secrets.token_bytes(32) for _ in range(4)]
    a.hear(stored(small, TOKENS))
    b.hear(stored(large[:2], TOKENS[:8]), stored(large[2:], TOKENS[8:], parent=large[1]))
    assert depths(pods) == (4, 4)
    a.hear(removed(small[3]))
    b.hear(removed(large[1]), removed(small[2]))  # another pod's hash means nothing here
    assert depths(pods) == (3, 1)


def test_equal_tokens_with_another_salt_are_other_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    a, b = pods = two()
    salted = stored([1, 2], TOKENS[:8], salt="s1-secret")
    out = a.hear(salted, stored([3, 4], TOKENS[8:], parent=2))
    b.hear(stored(NAMES, TOKENS))
    assert depths(pods, salt="s1-secret") == (4, 0)
    assert depths(pods, salt="s2") == (0, 0)
    assert depths(pods) == (0, 4)
    assert "s1-secret" not in f"{out!r} {a.table!r} {caplog.text}"


def test_adapters_match_by_name_and_numbers_only_within_a_pod() -> None:
    a, b = pods = two()
    a.hear(stored(NAMES, TOKENS, adapter="a1"))
    b.hear(stored(NAMES[:2], TOKENS[:8], adapter="a1"), stored([3, 4], TOKENS[8:], parent=2))
    assert depths(pods, adapter="a1") == (4, 4)
    assert depths(pods) == depths(pods, adapter="a2") == (0, 0)
    a, b = pods = two()
    a.hear(stored(NAMES, TOKENS, adapter_id=7))
    b.hear(stored(NAMES, TOKENS, adapter_id=7))
    assert not a.blocks() & b.blocks()
    assert depths(pods) == (0, 0)  # nobody can ask for a number
    a.hear(removed(*NAMES))
    assert not a.blocks()


def image(name: str) -> BlocksStored:
    """An image reaches into the second block of four."""
    names = [ord(name) * 10 + at for at in range(4)]
    extra = ((), (f"img{name}@0",), (), ())
    return stored([1, *names[1:]], TOKENS, extra=extra)


def test_images_behind_one_placeholder_token_are_told_apart() -> None:
    a, b = two()
    out = a.hear(image("A"))
    b.hear(image("B"))
    assert not out.left_out
    space = Namespace("m", 4)

    def asked(**items: str) -> tuple[int, int]:
        extra = {1: (f"{items['item']}@0",)} if items else None
        found = a.view.depths(chain(TOKENS, space, extra).blocks)
        return found[P][0], found[Q][0]

    assert asked(item="imgA") == (4, 1)
    assert asked(item="imgB") == (1, 4)
    assert asked(item="imgC") == asked() == (1, 1)
    a.hear(removed(*(650 + at for at in (1, 2, 3))))
    assert asked(item="imgA") == (1, 1)


def test_pairs_are_indexed_and_said_to_be_uncertain_in_one_pod_only() -> None:
    a, b = pods = two()
    a.hear(stored(NAMES, TOKENS, paired=True))
    assert "speculative" in a.hear().caveat and not b.hear(stored(NAMES, TOKENS)).caveat
    assert depths(pods) == (4, 4)
    assert "lookahead" in b.hear(stored([9], [1, 2, 3, 4], lookahead=2)).caveat


# -- delimiters ------------------------------------------------------------------------------

OWNERS = ["[fd00::1]:8000", "a@b", "a", "a@b@c", "ns/pod:rank", "a@3", "CPU:1", "p|q{r}"]
MODELS = ["org/model:v1 with spaces", "m", "a@b/c:d"]


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    kept: Store = MemoryStore(SystemClock())
    if request.param == "redis":
        url, prefix = (request.getfixturevalue(f"redis_{name}") for name in ("url", "prefix"))
        kept = RedisStore(url, prefix)
    yield kept
    await kept.close()


async def _tell(store: Store, worker: Worker, model: str, adapter: str) -> None:
    epoch = await store.begin_life(worker, None)
    translator = Translator(worker, epoch, model, {})
    first = stored(NAMES, TOKENS, adapter=adapter)
    cpu = stored([1, 2], tier=Tier.CPU)
    out = translator.translate([first, cpu])
    await store.apply(Batch(worker, epoch, 0, 0, tuple(out.changes), out.rows))


@pytest.mark.parametrize("model", MODELS)
async def test_names_with_delimiters_come_through_store_and_view(store: Store, model: str) -> None:
    workers = [Worker(Pod(name), rank) for name in OWNERS for rank in (0, 3)]
    assert [Worker.parse(str(worker)) for worker in workers] == workers
    assert len({str(worker) for worker in workers}) == len(workers)
    tail = store.tail(await store.head())
    for worker in workers:
        await _tell(store, worker, model, "x@gpu")
    loaded, told = View(), View()
    loaded.load(await store.snapshot())
    asked = chain(TOKENS, Namespace(model, 4, "x@gpu")).blocks
    while set(told.depths(asked)) != set(workers):
        for change in (await anext(tail)).changes:
            told.apply(change)
    for view in (loaded, told):
        assert {
            worker: depth for worker, (depth, _) in view.depths(asked).items()
        } == dict.fromkeys(workers, 4)
        assert view.depths(chain(TOKENS, Namespace(model, 4, "x")).blocks) == {}
        assert set(view.holders(asked[0])[workers[0]]) == {Tier.GPU, Tier.CPU}


async def test_the_end_of_one_is_not_the_end_of_another_that_begins_alike(store: Store) -> None:
    alike = [Worker(Pod("a")), Worker(Pod("a@b")), Worker(Pod("a"), 3), Worker(Pod("a@3"))]
    for worker in alike:
        await _tell(store, worker, "m", "")
    tail = store.tail(await store.head())
    view = View()
    view.load(await store.snapshot())
    position = await store.position(alike[0])
    assert position is not None
    await store.forget(alike[0], position.epoch)
    (change,) = (await anext(tail)).changes
    assert isinstance(change, Cleared)
    assert change == Cleared(alike[0], position.epoch, ClearReason.GONE)
    view.apply(change)
    again = View()
    again.load(await store.snapshot())
    for one in (view, again):
        assert set(one.depths(BLOCKS)) == set(alike[1:])
    for worker in alike[1:]:
        assert len(await store.table(worker)) >= 4


def test_a_stored_change_keeps_the_names_it_was_given() -> None:
    worker = Worker(Pod("a@b"), 2)
    (change,) = Ingest(worker).hear(stored(NAMES, TOKENS)).changes
    assert isinstance(change, Stored) and change.worker == worker


@pytest.mark.parametrize("tier", list(Tier))
def test_an_event_that_names_very_many_blocks_costs_no_more_than_may_wait(tier: Tier) -> None:
    ingest = Ingest(limits=Limits(most_waiting=400))
    out = ingest.hear(stored(range(1, 10_001), tier=tier))
    assert out.waiting == {"kept": 100} and out.left_out["expired"] == 9_900
    ingest.hear(stored([1], tokens_of(1)))
    assert ingest.copies(1)[list(Tier).index(tier)] >= 1  # the first of them are not lost

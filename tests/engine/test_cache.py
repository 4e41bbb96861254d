"""Cache: no page is lost, none is used twice, and what is told is what is there."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplane.engine.cache import Cache, Lease, Pages
from kvplane.events import AllCleared, BlocksRemoved, BlocksStored, engine_hash


def tokens(blocks: str, size: int = 4) -> list[int]:
    """ "ab" -> two blocks of the letters' codes."""
    return [ord(letter) for letter in blocks for _ in range(size)]


def leased(cache: Cache, ids: list[int], room: int = 0) -> Lease:
    lease = cache.lease(ids, room)
    assert lease is not None
    return lease


def served(cache: Cache, ids: list[int]) -> Lease:
    """A whole sequence: leased, computed, given back."""
    lease = leased(cache, ids)
    cache.computed(lease, len(ids))
    cache.give_back(lease)
    return lease


def told(cache: Cache) -> list[str]:
    """Events as short texts."""
    out = []
    for event in cache.drain():
        if isinstance(event, BlocksStored):
            out.append("+" + "".join(chr(t) for t in event.tokens[:: event.block_size]))
        elif isinstance(event, BlocksRemoved):
            out.append("-" * len(event.hashes))
        else:
            out.append("clear")
    return out


def test_a_prefix_is_reused_but_never_the_last_token() -> None:
    cache = Cache(8, 4, "vllm")
    served(cache, tokens("abc"))
    assert leased(cache, tokens("abcd")).cached_tokens == 12
    assert leased(cache, tokens("abc")).cached_tokens == 8
    assert leased(cache, [*tokens("ab"), 1]).cached_tokens == 8
    assert cache.hits_tokens == 28


def test_a_partial_block_is_never_told() -> None:
    cache = Cache(8, 4, "vllm")
    served(cache, tokens("a")[:3])
    assert told(cache) == []


def test_an_answer_fills_blocks_and_tells_them_too() -> None:
    cache = Cache(8, 4, "vllm")
    lease = leased(cache, tokens("a"), room=4)
    cache.computed(lease, 4)
    for token in tokens("b"):
        lease.tokens.append(token)
        cache.computed(lease, len(lease.tokens))
    first, second = cache.drain()
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert second.parent == first.hashes[-1]
    assert (first.parent, second.tokens) == (None, tokens("b"))


def test_eviction_takes_the_oldest_from_tail_to_head_and_tells_before_the_next_store() -> None:
    cache = Cache(4, 4, "vllm")
    served(cache, tokens("abc"))
    names = {block.position: cache.name(block) for block in cache.blocks()}
    cache.drain()
    served(cache, tokens("xyz"))
    events = cache.drain()
    removed = [engine_hash(e.hashes[0]) for e in events if isinstance(e, BlocksRemoved)]
    assert removed == [names[2], names[1]]
    assert isinstance(events[-1], BlocksStored)


def test_sglang_merges_removals() -> None:
    cache = Cache(4, 4, "sglang")
    served(cache, tokens("abc"))
    served(cache, tokens("xyz"))
    assert told(cache) == ["+abc", "--", "+xyz"]


def test_a_sequence_at_work_keeps_its_blocks() -> None:
    cache = Cache(4, 4, "vllm")
    lease = leased(cache, tokens("ab"))
    cache.computed(lease, 8)
    assert cache.lease(tokens("xyz"), 0) is None
    assert cache.lease(tokens("xy"), 0) is not None


def test_room_that_is_refused_changes_nothing() -> None:
    cache = Cache(4, 4, "vllm")
    served(cache, tokens("ab"))
    cache.drain()
    assert cache.lease(tokens("abc"), room=20) is None
    assert (cache.pages(), cache.drain(), cache.at_work) == (Pages(2, 2, 0), [], 0)


def test_two_at_once_with_one_prompt_tell_it_once() -> None:
    cache = Cache(8, 4, "vllm")
    one, two = leased(cache, tokens("ab")), leased(cache, tokens("ab"))
    cache.computed(one, 8)
    cache.computed(two, 8)
    assert told(cache) == ["+ab"]
    cache.give_back(one)
    cache.give_back(two)
    assert cache.pages() == Pages(6, 2, 0)


def test_pages_in_quarantine_are_nobodys_until_they_are_fenced() -> None:
    cache = Cache(4, 4, "vllm")
    lease = leased(cache, tokens("ab"), room=4)
    cache.quarantine(lease, lease.pages[:2])
    assert cache.pages() == Pages(2, 0, 2)
    assert cache.lease(tokens("xyz"), 0) is None
    cache.unquarantine(lease.pages)
    cache.unquarantine(lease.pages)
    assert cache.pages() == Pages(4, 0, 0)


def test_clear_waits_for_sequences_and_is_told() -> None:
    cache = Cache(4, 4, "vllm")
    lease = leased(cache, tokens("a"))
    cache.computed(lease, 4)
    assert not cache.clear()
    cache.give_back(lease)
    assert cache.clear()
    assert told(cache) == ["+a", "clear"]
    assert cache.pages() == Pages(4, 0, 0)


def test_another_salt_is_another_block() -> None:
    cache = Cache(8, 4, "vllm")
    served(cache, tokens("ab"))
    salted = cache.lease(tokens("ab"), 0, salt="tenant")
    assert salted is not None and salted.cached_tokens == 0


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_hashes_have_the_form_of_their_engine(form: str) -> None:
    cache = Cache(8, 4, form)
    served(cache, tokens("ab"))
    event = cache.drain()[0]
    assert isinstance(event, BlocksStored)
    first = hashlib.sha256(struct.pack("<4I", *tokens("a"))).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *tokens("b"))).digest()
    expected = {
        "sglang": [int.from_bytes(d[:8], "big", signed=True) for d in (first, second)],
        "vllm": [int.from_bytes(d[-8:], "big") for d in (first, second)],
    }
    assert [engine_hash(key) for key in event.hashes] == expected[form]


class AnyOrder(RuleBasedStateMachine):
    """Sequences come, grow, fail and go in any order; the account and the story stay true."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(7, 2, "vllm")
        self.leases: list[Lease] = []
        self.fencing: list[list[int]] = []
        self.heard: dict[bytes, bytes | None] = {}

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=9), room=st.integers(0, 4))
    def lease(self, ids: list[int], room: int) -> None:
        lease = self.cache.lease(ids, room)
        if lease is not None:
            assert lease.cached_tokens < len(ids)
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if len(lease.tokens) < 2 * len(lease.pages) and data.draw(st.booleans()):
            lease.tokens.append(data.draw(st.integers(0, 1)))
        self.cache.computed(lease, len(lease.tokens))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), bad=st.booleans())
    def end(self, data: st.DataObject, bad: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if bad:
            self.cache.quarantine(lease, lease.pages[:2])
            self.fencing.append(lease.pages[:2])
        self.cache.give_back(lease)
        self.cache.give_back(lease)

    @precondition(lambda self: self.fencing)
    @rule()
    def fence(self) -> None:
        self.cache.unquarantine(self.fencing.pop())

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == (not self.leases)

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        free, own = self.cache._free, [p for lease in self.leases for p in lease.own]
        blocks = [block.page for block in self.cache.blocks()]
        places = [*free, *own, *blocks, *self.cache._quarantined]
        assert sorted(places) == list(range(self.cache.total))
        pages = self.cache.pages()
        assert pages.free + pages.used + pages.quarantined == self.cache.total

    @invariant()
    def who_listens_knows_exactly_what_is_there(self) -> None:
        for event in self.cache.drain():
            if isinstance(event, AllCleared):
                self.heard.clear()
            elif isinstance(event, BlocksRemoved):
                for key in event.hashes:
                    del self.heard[key]
                    assert key not in self.heard.values(), "removed before its children"
            else:
                parent = event.parent
                for key in event.hashes:
                    assert key not in self.heard, "told twice"
                    assert parent is None or parent in self.heard, "told before its parent"
                    self.heard[key] = parent
                    parent = key
        assert {engine_hash(key) for key in self.heard} == {
            self.cache.name(block) for block in self.cache.blocks()
        }

    @invariant()
    def what_is_at_work_is_resident(self) -> None:
        resident = {block.digest for block in self.cache.blocks()}
        assert all(block.digest in resident for lease in self.leases for block in lease.blocks)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase

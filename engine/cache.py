"""Cache: which page belongs to whom, and what may be reused?

Pure. One per dp rank; only the event loop touches it. model.py fills the pages, publisher.py says
aloud what `drain` returns. Open it to change reuse, eviction or how blocks are named.

    page: free --lease--> of one lease --full--> block (refs) --give_back--> idle --evict--> free
                             `--quarantine--> quarantined --unquarantine--> free

A block names its tokens *and all before them* (SHA-256 chain). A lease holds every full block of
its sequence, so an ancestor is always given back after its descendants and evicted after them:
what is resident is always a set of whole prefixes.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvplane.events import AllCleared, BlocksRemoved, BlocksStored, EngineEvent, engine_key

SALT_PREFIX = b"sglang-cache-salt-v1\x00"  # as SGLang starts the chain of a salted prompt


@dataclass(slots=True)
class Block:
    """One full page whose tokens and prefix are known."""

    digest: bytes
    parent: bytes | None  # digest of the block before; None at the root
    page: int
    tokens: tuple[int, ...]
    position: int  # number of the block within its prefix, from 0
    salt: str
    refs: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """Pages of one sequence at work. `tokens` grows while it answers."""

    tokens: list[int]
    pages: list[int]
    cached_tokens: int  # found in the cache, from the start
    salt: str
    blocks: list[Block] = field(default_factory=list)  # full blocks, ours or shared, all held
    own: set[int] = field(default_factory=set)  # pages that are no block
    open: bool = True


@dataclass(frozen=True, slots=True)
class Pages:
    """Where all pages are; free + used + quarantined = all of them."""

    free: int
    used: int
    quarantined: int


def digest(parent: bytes | None, tokens: Sequence[int], salt: str = "") -> bytes:
    """Name of a block: SHA-256 of its parent's digest (or salt) and its ids as little u32."""
    if parent is None and salt:
        parent = hashlib.sha256(SALT_PREFIX + salt.encode()).digest()
    return hashlib.sha256((parent or b"") + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def published(name: bytes, form: str) -> int:
    """A digest as events show it: SGLang the first 8 bytes signed, vLLM the last 8 unsigned."""
    if form == "sglang":
        return int.from_bytes(name[:8], "big", signed=True)
    return int.from_bytes(name[-8:], "big")


class Cache:
    """The paged pool of one dp rank."""

    def __init__(self, pages: int, page_tokens: int, form: str) -> None:
        self.page_tokens = page_tokens
        self.total = pages
        self._form = form
        self._free = list(range(pages - 1, -1, -1))
        self._blocks: dict[bytes, Block] = {}
        self._idle: OrderedDict[bytes, Block] = OrderedDict()  # refs 0, oldest first
        self._quarantined: set[int] = set()
        self._leases: set[Lease] = set()
        self._events: list[EngineEvent] = []
        self.hits_tokens = self.evicted_blocks = 0

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def lease(self, tokens: Sequence[int], room: int, salt: str = "") -> Lease | None:
        """Pages for `tokens` and `room` tokens more; None where there are too few right now.

        Reuses the longest known prefix, but never the last token: it must be computed.
        """
        found = self._match(tokens, salt)
        need = self.pages_for(len(tokens) + room) - len(found)
        for block in found:  # before evicting: what is reused must stay
            self._hold(block)
        if need > len(self._free) + len(self._idle):
            self._drop(found)
            return None
        self._evict(need - len(self._free))
        own = [self._free.pop() for _ in range(need)]
        cached = len(found) * self.page_tokens
        self.hits_tokens += cached
        pages = [block.page for block in found] + own
        lease = Lease(list(tokens), pages, cached, salt, found, set(own))
        self._leases.add(lease)
        return lease

    def computed(self, lease: Lease, tokens: int) -> None:
        """The first `tokens` tokens have their KV in the pages; tells blocks that became full."""
        assert tokens <= len(lease.tokens), f"{tokens} of {len(lease.tokens)} tokens computed"
        new: list[Block] = []
        while (len(lease.blocks) + 1) * self.page_tokens <= tokens:
            block = self._next_block(lease)
            known = self._blocks.get(block.digest)
            if known is None:
                self._blocks[block.digest] = known = block
                lease.own.discard(block.page)
                new.append(block)
            else:  # somebody else was faster: our page stays ours, theirs is what others find
                self._tell_stored(new)
                new = []
            self._hold(known)
            lease.blocks.append(known)
        self._tell_stored(new)

    def give_back(self, lease: Lease) -> None:
        """The sequence is over; its full blocks stay findable. Safe to call twice."""
        if lease.open:
            self._free.extend(sorted(lease.own, reverse=True))
            self._close(lease)

    def quarantine(self, lease: Lease, pages: Iterable[int]) -> None:
        """As give_back, but late bytes may still hit those of its own pages that are named."""
        if lease.open:
            hit = lease.own & set(pages)
            self._quarantined |= hit
            self._free.extend(sorted(lease.own - hit, reverse=True))
            self._close(lease)

    def unquarantine(self, pages: Iterable[int]) -> None:
        """No late byte can reach these pages any more. Pages not in quarantine are left alone."""
        fenced = self._quarantined & set(pages)
        self._quarantined -= fenced
        self._free.extend(sorted(fenced, reverse=True))

    def clear(self) -> bool:
        """Forget every block; False and nothing done while a sequence is at work."""
        if self._leases:
            return False
        self._free.extend(block.page for block in self._blocks.values())
        self._blocks.clear()
        self._idle.clear()
        self._events.append(AllCleared())
        return True

    def drain(self) -> list[EngineEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def pages(self) -> Pages:
        """The account."""
        held = len(self._blocks) + sum(len(lease.own) for lease in self._leases)
        return Pages(len(self._free), held, len(self._quarantined))

    def blocks(self) -> list[Block]:
        """Everything resident, parents before children."""
        return sorted(self._blocks.values(), key=lambda block: block.position)

    def name(self, block: Block) -> int:
        """A block's hash as our events show it."""
        return self.name_of(block.digest)

    def name_of(self, name: bytes) -> int:
        """The same for a digest."""
        return published(name, self._form)

    @property
    def at_work(self) -> int:
        """Sequences that hold pages now."""
        return len(self._leases)

    def _match(self, tokens: Sequence[int], salt: str) -> list[Block]:
        found: list[Block] = []
        name: bytes | None = None
        for at in range(0, len(tokens) - self.page_tokens, self.page_tokens):
            name = digest(name, tokens[at : at + self.page_tokens], salt)
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def _next_block(self, lease: Lease) -> Block:
        position = len(lease.blocks)
        at = position * self.page_tokens
        ids = tuple(lease.tokens[at : at + self.page_tokens])
        parent = lease.blocks[-1].digest if lease.blocks else None
        name = digest(parent, ids, lease.salt)
        return Block(name, parent, lease.pages[position], ids, position, lease.salt)

    def _hold(self, block: Block) -> None:
        block.refs += 1
        self._idle.pop(block.digest, None)

    def _drop(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):  # tail first: it is the first to be evicted
            block.refs -= 1
            if block.refs == 0:
                self._idle[block.digest] = block

    def _close(self, lease: Lease) -> None:
        lease.own = set()
        lease.open = False
        self._leases.discard(lease)
        self._drop(lease.blocks)

    def _evict(self, count: int) -> None:
        gone: list[Block] = []
        for _ in range(count):
            _, block = self._idle.popitem(last=False)
            del self._blocks[block.digest]
            self._free.append(block.page)
            gone.append(block)
        self.evicted_blocks += len(gone)
        keys = tuple(self._key(block.digest) for block in gone)
        if self._form == "sglang" and keys:  # SGLang merges removals, vLLM tells one by one
            self._events.append(BlocksRemoved(keys))
        else:
            self._events.extend(BlocksRemoved((key,)) for key in keys)

    def _tell_stored(self, new: Sequence[Block]) -> None:
        if not new:
            return
        parent = new[0].parent
        self._events.append(
            BlocksStored(
                hashes=tuple(self._key(block.digest) for block in new),
                parent=None if parent is None else self._key(parent),
                tokens=[token for block in new for token in block.tokens],
                block_size=self.page_tokens,
                salt=new[0].salt,
            )
        )

    def _key(self, name: bytes) -> bytes:
        return engine_key(published(name, self._form))

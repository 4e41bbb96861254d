"""Service load: what engines tell, in vLLM's wire form, and what is asked; for bench/service.py.

Conversations of one length that share stems. Engine hashes are opaque; tokens are the truth, and
`expected` is worked out from them.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

SIZE = 16  # tokens of a block
CHUNK = 32  # blocks of one event
VOCABULARY = 128_000
HELD = (0.0, 0.5, 0.95)  # parts of a prompt that somebody holds
Frame = tuple[int, bytes]  # worker, batch of events as msgpack


@dataclass
class Conversation:
    """Who holds it, and its tokens."""

    worker: int
    stem: int
    tokens: array[int]


@dataclass
class Prompt:
    """What is asked, and how many blocks of it each worker holds; those of none left out."""

    tokens: array[int]
    expected: dict[int, int]


@dataclass
class Load:
    """`count` conversations of `blocks` blocks, spread over the workers."""

    workers: int
    count: int
    blocks: int
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    told: int = 0  # blocks, all of them

    def __post_init__(self) -> None:
        self.shared = self.blocks // 4
        stems = [self.some(self.shared) for _ in range(4)]
        fresh = self.blocks - self.shared
        self.conversations = [
            Conversation(number % self.workers, stem := number // self.workers % 4,
                         stems[stem] + self.some(fresh))
            for number in range(self.count)
        ]  # fmt: skip

    def some(self, blocks: int) -> array[int]:
        """Tokens that nobody has seen."""
        return array("I", self.chance.choices(range(VOCABULARY), k=blocks * SIZE))

    def frames(self) -> Iterator[Frame]:
        """Every conversation stored; a stem once for each worker."""
        known: set[tuple[int, int]] = set()
        for one in self.conversations:
            names = [self.chance.getrandbits(63) for _ in range(self.blocks)]
            names[: self.shared] = range((one.stem + 1) << 20, ((one.stem + 1) << 20) + self.shared)
            first = self.shared if (one.worker, one.stem) in known else 0
            known.add((one.worker, one.stem))
            for at in range(first, self.blocks, CHUNK):
                parent = names[at - 1] if at else None
                yield one.worker, self.batch(names[at : at + CHUNK], parent, one.tokens, at)

    def batch(self, names: list[int], parent: int | None, tokens: array[int], at: int) -> bytes:
        """One event in a batch, as vLLM sends it."""
        part = tokens[at * SIZE : (at + len(names)) * SIZE].tolist()
        self.told += len(names)
        return msgspec.msgpack.encode([0.0, [["BlockStored", names, parent, part, SIZE, None]], 0])

    def marks(self) -> list[tuple[Frame, array[int]]]:
        """One block more for each worker: who can answer it has read all before."""
        found = []
        for worker in range(self.workers):
            tokens = self.some(1)
            frame = self.batch([self.chance.getrandbits(63)], None, tokens, 0)
            found.append(((worker, frame), tokens))
        return found

    def prompts(self, count: int) -> list[Prompt]:
        """Whole prompts whose first part is held; the rest of each nobody has seen."""
        found = []
        for number in range(count):
            one = self.chance.choice(self.conversations)
            held = int(self.blocks * HELD[number % len(HELD)])
            tokens = one.tokens[: held * SIZE] + self.some(self.blocks - held)
            expected = {
                other.worker: min(held, self.shared)
                for other in self.conversations
                if other.stem == one.stem and held
            }
            found.append(Prompt(tokens, expected | ({one.worker: held} if held else {})))
        return found

"""Foretold: what was said of a request when it was routed, kept until its engine has answered.

Pure: nouns of choice.py (which makes them) and of closed_loop.py (which compares). Open it to keep
one more fact of a choice for the tests of suspicions.py.

    prompt 100 tokens, blocks of 16, 6 held     tokens 96, predicted 96, most 96
    prompt  96 tokens, blocks of 16, 6 held     tokens 96, predicted 80, most 80
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvplane.index import View, chain, rank
from kvplane.vocabulary import Epoch, Namespace, Worker


class Depth(msgspec.Struct, frozen=True, gc=False):
    """How much of the prompts one worker holds."""

    blocks: int = 0  # held, unbroken from the start, over all prompts
    asked: int = 0  # full blocks of the prompts
    tokens: int = 0
    predicted: int = 0  # tokens an engine will report as cached: never a prompt's last one


class Foretold(msgspec.Struct, frozen=True, gc=False):
    """What the index said of the worker that was chosen, and of the others."""

    worker: Worker
    epoch: Epoch | None
    last: int | None  # number of the worker's last batch at that time
    exact: bool  # did ingest vouch for it?
    space: Namespace  # that the prompts were ranked in, with the worker's block size
    prompts: Sequence[Sequence[int]]
    depths: Mapping[Worker, Depth]

    @property
    def predicted(self) -> int:
        """Tokens its engine should report as cached."""
        found = self.depths.get(self.worker)
        return found.predicted if found else 0

    @property
    def most(self) -> int:
        """The most it can report: engines compute every prompt's last token."""
        prompts = self.prompts
        return self.reusable(prompts[0]) if len(prompts) == 1 else sum(map(self.reusable, prompts))

    @property
    def tokens(self) -> int:
        """Length of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def mark(self) -> int:
        """Tells prompts apart, without hashing all of them again."""
        return hash(tuple((len(one), tuple(one[-32:])) for one in self.prompts))

    def reusable(self, prompt: Sequence[int]) -> int:
        """Tokens of one prompt that can come out of a cache of whole blocks."""
        return max(0, len(prompt) - 1) // self.space.block_size * self.space.block_size

    def now(self, view: View, space: Namespace | None = None) -> dict[Worker, int]:
        """What would be predicted of every worker now, in this or another namespace of the same
        block size; workers that hold nothing are left out."""
        found: dict[Worker, int] = {}
        for prompt in self.prompts:
            most = self.reusable(prompt)
            for held in rank(view, chain(prompt, space or self.space)):
                if not held.depth_tokens:
                    break  # deepest come first
                depth = min(held.depth_tokens, most)
                found[held.worker] = found.get(held.worker, 0) + depth
        return found

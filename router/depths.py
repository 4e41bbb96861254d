"""Depths: how much of these prompts does each of these workers hold?

Pure: looks at the view, waits for nothing. choice.py asks per attempt, of those that may be taken.
Open it to change which namespace a worker is asked in, or how prompts of a list add up.

    targets -> block sizes -> one chain per size and prompt -> holders' depths -> added up
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvplane.index import View
from kvplane.vocabulary import Namespace, PrefixChain, Worker

from .foretold import Depth
from .plans import Prompt
from .target import Target

MOST_RANKED = 64  # prompts of a list that are ranked; more change no choice and cost the loop
NOTHING = Depth()


class Ranked(msgspec.Struct, frozen=True):
    """What the index says of the prompts, and how it was asked."""

    candidates: int  # targets that were ranked
    model: str = ""
    adapter: str = ""
    sizes: Mapping[Worker, int] = {}
    depths: Mapping[Worker, Depth] = {}


@dataclass(frozen=True, slots=True)
class Ranker:
    """Binds what is looked at."""

    view: View
    chain: Callable[..., PrefixChain]  # names of tokens
    assumed: int | None  # tokens a block, where neither events nor anybody tell
    dark: Callable[[Worker], bool]  # may its blocks not be relied on?

    def block_size(self, target: Target) -> int | None:
        """Tokens a block: as its events say, as declared, as configured."""
        return self.view.block_size(target.worker) or target.up.block_size or self.assumed

    def rank(
        self,
        asked: str,
        tokens: Sequence[Sequence[int]],
        prompt: Prompt,
        targets: Sequence[Target],
    ) -> Ranked:
        """The depth of every target, over all prompts. One whose stream our own check calls dark
        holds nothing that could be relied on."""
        model = min((target.model for target in targets if target.model), default=asked)
        adapter = prompt.adapter or (asked if asked not in (model, "") else "")
        sizes = {
            target.worker: size
            for target in targets
            if target.model in (model, "") and (size := self.block_size(target))
        }
        depths: dict[Worker, Depth] = {}
        for size in set(sizes.values()):
            space = Namespace(model, size, adapter, prompt.salt)
            mine = [worker for worker, own in sizes.items() if own == size]
            depths |= self._depths(space, tokens[:MOST_RANKED], mine)
        return Ranked(len(targets), model, adapter, sizes, depths)

    def _depths(
        self, space: Namespace, prompts: Sequence[Sequence[int]], workers: list[Worker]
    ) -> dict[Worker, Depth]:
        """Of workers of one block size; most hold nothing, so they share what says so."""
        size = space.block_size
        none = Depth(asked=sum(len(tokens) // size for tokens in prompts))
        found = dict.fromkeys(workers, none)
        for tokens in prompts:
            blocks = self.chain(tokens, space).blocks
            most = max(0, len(tokens) - 1) // size * size
            for worker, depth in self.view.prefixes(blocks, workers, size).items():
                if not depth or self.dark(worker):
                    continue
                before = found[worker]
                found[worker] = Depth(
                    before.blocks + depth,
                    none.asked,
                    before.tokens + depth * size,
                    before.predicted + min(depth * size, most),
                )
        return found

"""Depths: how much of these prompts does each of these workers hold?

Pure: looks at the view, waits for nothing. choice.py asks per attempt, of those that may be taken.
Open it to change which namespace a worker is asked in, or how prompts of a list add up.

    targets -> block sizes -> one chain per size and prompt -> holders' depths -> added up
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvplane.index import View
from kvplane.vocabulary import Namespace, PrefixChain, Worker

from .foretold import Depth
from .plans import Prompt
from .sides import Sides, Spaces
from .target import Target

MOST_RANKED = 64  # prompts of a list that are ranked; more change no choice and cost the loop
NOTHING = Depth()


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """What the index says of the prompts, and how it was asked."""

    candidates: int  # targets that were ranked
    model: str = ""
    adapter: str = ""
    spaces: Mapping[Worker, Namespace] = {}
    depths: Mapping[Worker, Depth] = {}
    held: bool = False  # does anybody hold anything?


class Ranker(msgspec.Struct, frozen=True):
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
        prompt: Prompt,
        tokens: Sequence[Sequence[int]],
        sides: Sides,
        targets: Sequence[Target],
    ) -> Ranked:
        """The depth of every target, over all prompts. One whose stream our own check calls dark
        holds nothing that could be relied on. `sides` are those of the model that is `asked` for,
        `targets` its prefills, or some of them."""
        spaces = sides.spaces
        if targets is not sides.prefills:
            spaces = self._spaces(asked, targets)
        elif spaces is None or spaces.turn != self.view.turn:
            spaces = sides.spaces = self._spaces(asked, targets)
        adapter, of, groups = spaces.adapter, spaces.of, spaces.groups
        if prompt.adapter or prompt.salt:
            adapter = prompt.adapter or adapter
            of, groups = _apart(groups, adapter, prompt.salt)
        depths: dict[Worker, Depth] = {}
        held = False
        for space, workers in groups:
            held = self._depths(depths, space, tokens[:MOST_RANKED], workers) or held
        return Ranked(len(targets), spaces.model, adapter, of, depths, held)

    def _spaces(self, asked: str, targets: Sequence[Target]) -> Spaces:
        model = min((target.model for target in targets if target.model), default=asked)
        adapter = asked if asked not in (model, "") else ""
        sizes: dict[int, list[Worker]] = {}
        for target in targets:
            if target.model in (model, "") and (size := self.block_size(target)):
                sizes.setdefault(size, []).append(target.worker)
        groups = [(Namespace(model, size, adapter), mine) for size, mine in sizes.items()]
        return Spaces(self.view.turn, model, adapter, _of(groups), tuple(groups))

    def _depths(
        self,
        depths: dict[Worker, Depth],
        space: Namespace,
        prompts: Sequence[Sequence[int]],
        workers: list[Worker],
    ) -> bool:
        """Add those of workers of one block size, and tell whether any is more than nothing: most
        hold nothing, so they share what says so."""
        size, held = space.block_size, False
        none = Depth(asked=sum([len(tokens) // size for tokens in prompts]))
        depths |= dict.fromkeys(workers, none)
        if not self._heard(workers):
            return False
        for tokens in prompts:
            found = self.view.prefixes(self.chain(tokens, space).blocks, workers, size)
            most = max(0, len(tokens) - 1) // size * size
            for worker, depth in found.items():
                if not depth or self.dark(worker):
                    continue
                before, held = depths[worker], True
                depths[worker] = Depth(
                    before.blocks + depth,
                    none.asked,
                    before.tokens + depth * size,
                    before.predicted + min(depth * size, most),
                )
        return held

    def _heard(self, workers: list[Worker]) -> bool:
        """Did any of them ever say what it holds? Else blocks would be named for nothing."""
        for worker in workers:  # noqa: SIM110  # a generator costs more than all the rest
            if self.view.facts(worker) is not None:
                return True
        return False


Group = tuple[Namespace, list[Worker]]


def _apart(
    groups: Sequence[Group], adapter: str, salt: str
) -> tuple[dict[Worker, Namespace], tuple[Group, ...]]:
    """The same for prompts that are kept apart from others."""
    found = [
        (Namespace(space.model, space.block_size, adapter, salt), workers)
        for space, workers in groups
    ]
    return _of(found), tuple(found)


def _of(groups: Sequence[Group]) -> dict[Worker, Namespace]:
    return {worker: space for space, workers in groups for worker in workers}

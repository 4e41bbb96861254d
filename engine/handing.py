"""Handing: compute a prompt and hand over its pages; what every node of a prefill does for a room.

Edge. prefill.py runs it for a request, following.py for what node 0 asks. Open it to change the
order of what happens between a prompt and the decode's verdict.

    lease -> (others begin) -> fill -> all ranks deliver, here and elsewhere -> first token
        whatever fails: the others are told before this raises
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from kvplane.transfer import Metadata, prompt_sum
from kvplane.vocabulary import Room

from .asks import Ask
from .logprobs import Likely
from .sequence import Sequences, pages_of_prompt
from .team import Gives
from .unit import Unit

Begin = Callable[[int], Sequence[Gives]]  # cached tokens -> ranks elsewhere that are at it now


def _nobody(cached_tokens: int) -> Sequence[Gives]:
    return ()


class Handing:
    """No state of its own."""

    def __init__(self, sequences: Sequences, room_s: float) -> None:
        self._sequences, self._room_s = sequences, room_s

    async def run(
        self,
        unit: Unit,
        room: Room,
        ids: Sequence[int],
        salt: str,
        begin: Begin = _nobody,
        cached_tokens: int | None = None,
    ) -> tuple[int, int]:
        """(first token, cached tokens), once every decode rank agreed. Raises EngineError.

        `cached_tokens`: what to tell of them; None = what is found here.
        """
        assert unit.team is not None, "a prefill has ranks"
        lease = await unit.lease(ids, 0, salt)
        try:
            told = lease.cached_tokens if cached_tokens is None else cached_tokens
            others = begin(told)
            with _failing(others, room):
                context = await self._sequences.fill(unit, lease)
                token = await unit.compute.run(unit.model.answer, context)
                said = Metadata(
                    room, tokens=len(ids), first_token=token, cached_tokens=told,
                    prompt=prompt_sum(ids),
                )  # fmt: skip
                pages = pages_of_prompt(unit, lease, ids)
                await unit.team.deliver(room, pages, said, self._room_s, others)
            return token, told
        finally:
            unit.give_back(lease)  # deliver is over: nobody reads the pages any more

    async def inputs(self, unit: Unit, ask: Ask) -> tuple[Likely, ...]:
        """How likely the prompt's tokens were, where that is wanted; only a prefill tells it."""
        return await self._sequences.inputs(unit, ask)


@contextlib.contextmanager
def _failing(others: Sequence[Gives], room: Room) -> Iterator[None]:
    """They are told of a failure here."""
    try:
        yield
    except BaseException as error:
        for other in others:
            other.fail(room, str(error) or type(error).__name__)
        raise

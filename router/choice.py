"""Choice: which prefill and which decode serve this request, and how well do we know?

Pure: view, fleet and circuits are looked at, time and chance are arguments; no await. gateway.py
asks per attempt, picker and decode-entry will ask too. Open it to change what a choice rests on.

    prompts -> chains per block size -> depth per worker -> prefill policy -> pair <- decode policy
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from kvplane.index import View, chain
from kvplane.vocabulary import Epoch, Knowledge, Namespace, PrefixChain, Stage, Worker

from .availability import available, candidates
from .breaker import Breakers
from .depths import MOST_RANKED, NOTHING, Ranked, Ranker
from .errors import GatewayError
from .fleet import Fleet
from .foretold import Depth, Foretold
from .handoffs import HANDOFFS
from .meeting import Trail
from .pairing import Compatible, NoPair, Pair, pair
from .plans import Prompt
from .policies import POLICIES, Candidate, Need
from .request import Ask
from .settings import RouterSettings
from .sides import Sides
from .target import Judged, Target

WORSE = list(Knowledge)  # worst last
BYTES_PER_TOKEN = 4  # of a body, where its tokens are not known
ASSUMED_BLOCK = 256  # tokens, where nobody tells a block size; few engines have larger ones


class Choice(msgspec.Struct, frozen=True, gc=False):
    """Who serves, and why."""

    prefill: Target | None  # None: a unified worker does both
    decode: Target
    depth: Depth
    knowledge: Knowledge
    reason: str  # "" where knowledge is exact
    prefill_policy: str
    decode_policy: str
    candidates: int  # prefills that could have been taken
    prompt_tokens: int = 0  # of all prompts; 0 = not known
    prefill_epoch: Epoch | None = None  # lives the choice was made under, as the view has them
    decode_epoch: Epoch | None = None
    foretold: Foretold | None = None  # to be compared with what the engine tells; None = cannot be
    alone: str = ""  # why its decode serves it alone, though there is a prefill

    @property
    def holder(self) -> Target:
        """Whose cache was judged."""
        return self.prefill or self.decode


# Prefills and decodes, best first, and who would meet; None where one worker does both.
Weighed = tuple[Sequence[Candidate], Sequence[Candidate], Pair | NoPair | None]
Doubt = Callable[[Worker], Judged | None]
# Named once: every request passes all of them.
AVAILABILITY, INPUT, PAIR = Stage.AVAILABILITY, Stage.POLICY_INPUT, Stage.PAIR


def _unheard() -> float:
    """Nobody wants to know when a stage begins."""
    return 0.0


class Chooser:
    """Binds what a choice looks at."""

    def __init__(
        self,
        view: View,
        fleet: Fleet,
        breakers: Breakers,
        settings: RouterSettings,
        compatible: Compatible,
        chance: Callable[[], float],
        blind: Callable[[], str] = lambda: "",  # why the view itself cannot be believed now
        doubt: Doubt = lambda worker: None,  # our own checks of what the index says of a worker
        chain: Callable[..., PrefixChain] = chain,  # names of tokens; may remember some
    ) -> None:
        self._view, self._fleet, self._breakers = view, fleet, breakers
        self._settings, self._compatible = settings, compatible
        self._chance, self._blind, self._doubt = chance, blind, doubt
        self._ranker = Ranker(view, chain, settings.block_size, self._dark)
        self._first = POLICIES[settings.prefill_policy]
        self._second = POLICIES[settings.decode_policy]
        self._keyed = POLICIES["consistent_hash"] in (self._first, self._second)
        breakers.on_closed = fleet.returned

    def choose(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        without: Collection[Worker] = (),
        trail: Trail | None = None,
    ) -> Choice:
        """Raises GatewayError where nobody can serve. `trail` is told when each stage begins but
        the first, which is the pool's and begins now."""
        sides, ranked, ordered, seconds = self._order(ask, prompt, now, without, trail)
        if not seconds:
            return self._made(ask, None, ordered[0].target, ranked, prompt)
        prefill, decode = ordered[0].target, seconds[0].target
        if self._breakers.pairs.faults or not sides.fit(self._compatible):
            met = self._met(ordered, seconds, now)
            if isinstance(met, NoPair):
                raise GatewayError(met.code, met.reason)
            prefill, decode = met.prefill.target, met.decode.target
        if (handoff := HANDOFFS.get(prefill.way)) is None:
            known = ", ".join(sorted(HANDOFFS))
            why = f"no hand-off for {prefill.way}; known: {known}"
            raise GatewayError("no_compatible_pair", why)
        if alone := handoff.alone(ask):
            return self._made(ask, None, decode, ranked, prompt, alone)
        return self._made(ask, prefill, decode, ranked, prompt)

    def weigh(self, ask: Ask, prompt: Prompt, now: float) -> Weighed:
        """What `choose` would go by now; takes nobody's turn. Raises GatewayError as it does."""
        _, _, ordered, seconds = self._order(ask, prompt, now, ())
        return ordered, seconds, self._met(ordered, seconds, now) if seconds else None

    def _order(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        without: Collection[Worker],
        trail: Trail | None = None,
    ) -> tuple[Sides, Ranked, Sequence[Candidate], Sequence[Candidate]]:
        """Prefills and decodes, best first; unified workers and nobody."""
        fleet, breakers = self._fleet, self._breakers
        sides, settings = fleet.sides(ask.model), fleet.settings
        heard = trail or Trail(_unheard)
        steps, clock = heard.steps, heard.now
        steps += (AVAILABILITY, clock())
        tried = available(sides.prefills, breakers, settings, now, without)
        then = available(sides.decodes, breakers, settings, now, without) if sides.decodes else ()
        steps += (INPUT, clock())
        if prompt.tokens is None:
            ranked = Ranked(len(tried))
        else:
            ranked = self._ranker.rank(ask.model, prompt, prompt.tokens, sides, tried)
        steps += (PAIR, clock())
        firsts: Sequence[Candidate] = sides.firsts
        seconds: Sequence[Candidate] = sides.seconds
        ramping = now < fleet.ramping_until
        if ramping or ranked.held or tried is not sides.prefills:
            firsts = candidates(tried, ranked.depths, settings, now, ramping)
        if ramping or then is not sides.decodes:
            seconds = candidates(then, {}, settings, now, ramping)
        if len(firsts) > 1 or len(seconds) > 1:
            need = self._need(ask, prompt)
            firsts = self._first(firsts, need) if len(firsts) > 1 else firsts
            seconds = self._second(seconds, need) if len(seconds) > 1 else seconds
        return sides, ranked, firsts, seconds

    def _need(self, ask: Ask, prompt: Prompt) -> Need:
        tokens = prompt.total or len(ask.raw) // BYTES_PER_TOKEN
        return Need(tokens, _key(ask) if self._keyed else "", self._chance)

    def _met(
        self, firsts: Sequence[Candidate], seconds: Sequence[Candidate], now: float
    ) -> Pair | NoPair:
        return pair(firsts, seconds, self._compatible, self._breakers.pairs.apart(now))

    def others(self, model: str, without: Collection[Worker], now: float) -> bool:
        """Can somebody serve who is none of these, on each side?"""
        try:
            sides = self._fleet.sides(model)
        except GatewayError:
            return False
        return all(
            any(t.worker not in without and self._breakers.admits(t.worker, now) for t in side)
            for side in sides
            if side
        )

    def _dark(self, worker: Worker) -> bool:
        doubt = self._doubt(worker)
        return doubt is not None and _is_dark(doubt)

    def _made(
        self,
        ask: Ask,
        prefill: Target | None,
        decode: Target,
        ranked: Ranked,
        prompt: Prompt,
        alone: str = "",
    ) -> Choice:
        holder, tokens = prefill or decode, prompt.tokens
        depth, total = NOTHING, 0
        foretold: Foretold | None = None
        if tokens is not None:
            depth, total = ranked.depths.get(holder.worker, NOTHING), prompt.total
        if holder.deaf is not None:
            knowledge, reason = holder.deaf
        elif tokens is None:
            knowledge, reason = Knowledge.DARK, prompt.why or "no tokens"
        else:
            told, doubt = self._told(holder), self._doubt(holder.worker)
            knowledge, reason = _worse(told, doubt)
            if len(tokens) <= MOST_RANKED and ask.samples == 1:
                foretold = self._foretold(holder.worker, ranked, prompt, told, doubt)
        return Choice(
            prefill,
            decode,
            depth,
            knowledge,
            reason,
            self._settings.prefill_policy,
            self._settings.decode_policy,
            ranked.candidates,
            total,
            None if prefill is None else self._view.epoch(prefill.worker),
            self._view.epoch(decode.worker),
            foretold,
            alone,
        )

    def _foretold(
        self, worker: Worker, ranked: Ranked, prompt: Prompt, told: Judged, doubt: Judged | None
    ) -> Foretold:
        """What is compared later. Samples of one prompt are counted by each engine its own way."""
        facts, space = self._view.facts(worker), ranked.spaces.get(worker)
        exact = told[0] is Knowledge.EXACT and (doubt is None or not _is_dark(doubt))
        return Foretold(
            worker,
            facts.epoch if facts else None,
            facts.last if facts else None,
            exact and worker in ranked.depths,
            space or Namespace(ranked.model, ASSUMED_BLOCK, ranked.adapter, prompt.salt),
            prompt.tokens or (),
            ranked.depths,
        )

    def _told(self, holder: Target) -> tuple[Knowledge, str]:
        """What ingest wrote, as long as the view can be believed."""
        if blind := self._blind():
            return Knowledge.DARK, blind
        known = self._view.known(holder.worker)
        if known is None:
            return Knowledge.DARK, f"{holder.worker} was never heard of"
        return known.state, "" if known.state is Knowledge.EXACT else known.reason


def _worse(told: Judged, doubt: Judged | None) -> Judged:
    """Of what ingest wrote about a worker and our own checks of it."""
    if doubt is not None and WORSE.index(doubt[0]) >= WORSE.index(told[0]):
        return doubt  # of two that say as much, ours has seen it
    return told


def _is_dark(doubt: Judged) -> bool:
    return doubt[0] is Knowledge.DARK


def _key(ask: Ask) -> str:
    """What consistent_hash sticks to: a routing key, else the user."""
    for name, value in ask.headers:
        if name == b"x-smg-routing-key":
            return value.decode("latin-1")
    user = ask.body.get("user")
    return user if isinstance(user, str) else ""

"""Choice: which prefill and which decode serve this request, and how well do we know?

Pure: view, fleet and circuits are looked at, time and chance are arguments; no await. gateway.py
asks per attempt, picker and decode-entry will ask too. Open it to change what a choice rests on.

    prompts -> chains per block size -> depth per worker -> prefill policy -> pair <- decode policy
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvplane.index import View, chain
from kvplane.vocabulary import Knowledge, PrefixChain, Role, Stage, Worker

from .availability import available, candidates, left, served
from .belief import Belief, Doubt, worse
from .breaker import Breakers
from .chosen import Choice
from .depths import MOST_RANKED, NOTHING, Ranked, Ranker
from .errors import GatewayError
from .fleet import Fleet
from .foretold import Foretold
from .meeting import Trail
from .pairing import Compatible, NoPair, Pair, handoff, pair
from .plans import Prompt
from .policies import POLICIES, Candidate, Need
from .request import Ask, routing_key
from .settings import RouterSettings
from .sides import Sides
from .target import Target

__all__ = ["BYTES_PER_TOKEN", "Choice", "Chooser", "Weighed"]

BYTES_PER_TOKEN = 4  # of a body, where its tokens are not known
UNRANKED = Ranked(0)  # nobody was asked what it holds
MOST_KEPT = 4096  # choices of one model


Ordered = Sequence[Candidate]  # best first
# Prefills and decodes, and who would meet; None where one worker does both.
Weighed = tuple[Ordered, Ordered, Pair | NoPair | None]
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
        blind: Callable[[], str] = lambda: "",
        doubt: Doubt = lambda worker: None,
        chain: Callable[..., PrefixChain] = chain,  # names of tokens; may remember some
    ) -> None:
        self._view, self._fleet, self._breakers = view, fleet, breakers
        self._settings, self._compatible = settings, compatible
        self._chance, self._belief = chance, Belief(view, blind, doubt)
        self._ranker = Ranker(view, chain, settings.block_size, self._belief.is_dark)
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
        fleet, breakers = self._fleet, self._breakers
        sides, uneasy = fleet.sides(ask.model), fleet.uneasy
        if (
            prompt.tokens is not None
            or (without or breakers.shut or breakers.pairs.faults)
            or (uneasy and (uneasy.late or now >= uneasy.again))
            or (sides.several and now < fleet.ramping_until)
        ):
            sides = served(sides, fleet, ask.model, breakers, now, without)
            ordered = self._order(ask, prompt, now, sides, without, trail)
            return self._met_by(ask, prompt, now, sides, *ordered, without)
        # All may serve and nobody is asked what he holds: whose turn it is decides the rest.
        if trail is not None:
            at = trail.now()
            trail.steps += (AVAILABILITY, at, INPUT, at, PAIR, at)
        firsts, seconds = sides.firsts, sides.seconds
        if sides.several:
            firsts, seconds = self._sorted(ask, prompt, firsts, seconds, False)
        if ask.plain and sides.turn == self._view.turn:  # others may ask for what some cannot do
            first, second = firsts[0].target, seconds[0].target if seconds else None
            # These two met before, of the same fleet: sides are made anew with each change of it.
            found: Choice | None = sides.usual.get((first, second, prompt.reason))
            if found is not None:
                return found
        return self._met_by(ask, prompt, now, sides, UNRANKED, firsts, seconds)

    def _met_by(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        sides: Sides,
        ranked: Ranked,
        firsts: Ordered,
        seconds: Ordered,
        without: Collection[Worker] = (),
    ) -> Choice:
        """Who meets, of those in this order, and what is told of it."""
        prefill: Target | None = None
        decode, alone, taken = firsts[0].target, "", len(firsts)
        if seconds:
            prefill, decode = decode, seconds[0].target
            if self._breakers.pairs.faults or not (sides.fits or sides.fit(self._compatible)):
                met = self._met(firsts, seconds, now)
                if isinstance(met, NoPair):
                    if (whole := self._unified(ask, prompt, now, without)) is None:
                        raise GatewayError(met.code, met.reason)
                    return self._met_by(ask, prompt, now, *whole)
                prefill, decode = met.prefill.target, met.decode.target
            if alone := handoff(prefill).alone(ask):
                prefill = None
        if prompt.tokens is None:
            return self._alike(sides, ask, prefill, decode, taken, prompt, alone)
        return self._made(ask, prefill, decode, taken, ranked, prompt, alone)

    def weigh(self, ask: Ask, prompt: Prompt, now: float) -> Weighed:
        """What `choose` would go by now; takes nobody's turn. Raises GatewayError as it does."""
        fleet, breakers = self._fleet, self._breakers
        sides = served(fleet.sides(ask.model), fleet, ask.model, breakers, now, ())
        _, ordered, seconds = self._order(ask, prompt, now, sides, ())
        met = self._met(ordered, seconds, now) if seconds else None
        if isinstance(met, NoPair) and (whole := self._unified(ask, prompt, now, ())) is not None:
            return whole[2], whole[3], None
        return ordered, seconds, met

    def _unified(
        self, ask: Ask, prompt: Prompt, now: float, without: Collection[Worker]
    ) -> tuple[Sides, Ranked, Ordered, Ordered] | None:
        """Where no prefill fits a decode, those that do both, as where there is nobody else: the
        last one is asked again, or waited for. Raises AllShut."""
        sides = Sides(self._fleet.selectable(Role.BOTH, ask.model))
        if not sides.prefills:
            return None
        return sides, *self._order(ask, prompt, now, sides, without)

    def _order(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        sides: Sides,
        without: Collection[Worker],
        trail: Trail | None = None,
    ) -> tuple[Ranked, Ordered, Ordered]:
        """Prefills and decodes, best first; unified workers and nobody."""
        fleet, heard = self._fleet, trail or Trail(_unheard)
        steps, clock = heard.steps, heard.now
        tried: Sequence[Target] = sides.prefills
        then: Sequence[Target] = sides.decodes
        at = clock()
        steps += (AVAILABILITY, at)
        uneasy = fleet.uneasy
        if (uneasy and (uneasy.late or now >= uneasy.again)) or without or self._breakers.shut:
            tried, then = self._left(sides, without, now)
            at = clock()
        steps += (INPUT, at)
        ranked = UNRANKED
        if prompt.tokens is not None:
            ranked = self._ranker.rank(ask.model, prompt, prompt.tokens, sides, tried)
            at = clock()
        steps += (PAIR, at)
        firsts, seconds = sides.firsts, sides.seconds
        if not (sides.several or ranked.held):
            return ranked, firsts, seconds
        ramping = now < fleet.ramping_until
        if ramping or ranked.held or tried is not sides.prefills:
            firsts = candidates(tried, ranked.depths, fleet.settings, now, ramping)
        if ramping or then is not sides.decodes:
            seconds = candidates(then, {}, fleet.settings, now, ramping)
        return ranked, *self._sorted(ask, prompt, firsts, seconds, ramping)

    def _sorted(
        self, ask: Ask, prompt: Prompt, firsts: Ordered, seconds: Ordered, ramping: bool
    ) -> tuple[Ordered, Ordered]:
        """As the policies of both sides have it."""
        tokens = (prompt.tokens and prompt.total) or len(ask.raw) // BYTES_PER_TOKEN
        need = Need(tokens, routing_key(ask) if self._keyed else "", self._chance, ramping)
        return (
            self._first(firsts, need) if len(firsts) > 1 else firsts,
            self._second(seconds, need) if len(seconds) > 1 else seconds,
        )

    def _left(
        self, sides: Sides, without: Collection[Worker], now: float
    ) -> tuple[Sequence[Target], Sequence[Target]]:
        """Those of both sides that may be asked, where somebody may be left out."""
        fleet, breakers = self._fleet, self._breakers
        fleet.uneasy.look(now, fleet.settings)
        tried = available(sides.prefills, breakers, fleet.settings, now, without)
        if not sides.decodes:
            return tried, ()
        return tried, available(sides.decodes, breakers, fleet.settings, now, without)

    def _met(self, firsts: Ordered, seconds: Ordered, now: float) -> Pair | NoPair:
        return pair(firsts, seconds, self._compatible, self._breakers.pairs.apart(now))

    def others(self, model: str, without: Collection[Worker], now: float) -> bool:
        """Can somebody serve who is none of these, on each side?"""
        fleet, breakers = self._fleet, self._breakers
        try:
            sides = served(fleet.sides(model), fleet, model, breakers, now, without)
        except GatewayError:
            return False
        return left(sides, breakers, now, without)

    def _alike(
        self,
        sides: Sides,
        ask: Ask,
        prefill: Target | None,
        decode: Target,
        taken: int,
        prompt: Prompt,
        alone: str,
    ) -> Choice:
        """Where its tokens are not known nothing more of a request decides what is told of it: all
        of a pair are told the same, made once."""
        turn = self._view.turn
        if sides.turn != turn:
            sides.turn, sides.choices, sides.usual = turn, {}, {}
        key = prefill, decode, taken, prompt.reason, alone
        if (found := sides.choices.get(key)) is None:
            found = self._made(ask, prefill, decode, taken, UNRANKED, prompt, alone)
            if len(sides.choices) >= MOST_KEPT:
                return found
            sides.choices[key] = found
            if taken == len(sides.firsts) and not alone:
                both = (decode, None) if prefill is None else (prefill, decode)
                sides.usual[*both, prompt.reason] = found
        return found

    def _made(
        self,
        ask: Ask,
        prefill: Target | None,
        decode: Target,
        taken: int,
        ranked: Ranked,
        prompt: Prompt,
        alone: str,
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
            told, doubt = self._belief.of(holder.worker)
            knowledge, reason = worse(told, doubt)
            if len(tokens) <= MOST_RANKED and ask.samples == 1:
                foretold = self._belief.foretold(holder.worker, ranked, prompt, told, doubt)
        return Choice(
            prefill,
            decode,
            depth,
            knowledge,
            reason,
            self._settings.prefill_policy,
            self._settings.decode_policy,
            taken,
            total,
            None if prefill is None else self._view.epoch(prefill.worker),
            self._view.epoch(decode.worker),
            foretold,
            alone,
        )

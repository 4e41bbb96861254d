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
from .handoffs import HANDOFFS, way
from .pairing import Compatible, NoPair, Pair, pair
from .plans import REASONS, Prompt
from .policies import POLICIES, Candidate, Need
from .request import Ask
from .settings import RouterSettings
from .target import Target

WORSE = list(Knowledge)  # worst last
BYTES_PER_TOKEN = 4  # of a body, where its tokens are not known
ASSUMED_BLOCK = 256  # tokens, where nobody tells a block size; few engines have larger ones


class Choice(msgspec.Struct, frozen=True):
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
Weighed = tuple[list[Candidate], list[Candidate], Pair | NoPair | None]
Doubt = Callable[[Worker], tuple[Knowledge, str] | None]
Begin = Callable[[Stage], None]


def _unheard(stage: Stage) -> None:
    """Nobody wants to know when a stage begins."""


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
        breakers.on_closed = fleet.returned

    def choose(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        without: Collection[Worker] = (),
        begin: Begin = _unheard,
    ) -> Choice:
        """Raises GatewayError where nobody can serve. `begin` is told as each stage begins."""
        ranked, ordered, seconds = self._order(ask, prompt, now, without, begin)
        if not seconds:
            return self._made(ask, None, ordered[0].target, ranked, prompt)
        met = pair(ordered, seconds, self._compatible, self._breakers.pairs.apart(now))
        if isinstance(met, NoPair):
            raise GatewayError(met.code, met.reason)
        if (engine := way(met.prefill.target.up)) not in HANDOFFS:
            known = ", ".join(sorted(HANDOFFS))
            raise GatewayError("no_compatible_pair", f"no hand-off for {engine}; known: {known}")
        alone, decode = HANDOFFS[engine].alone(ask), met.decode.target
        prefill = None if alone else met.prefill.target
        return self._made(ask, prefill, decode, ranked, prompt, alone)

    def weigh(self, ask: Ask, prompt: Prompt, now: float) -> Weighed:
        """What `choose` would go by now; takes nobody's turn. Raises GatewayError as it does."""
        _, ordered, seconds = self._order(ask, prompt, now, ())
        if not seconds:
            return ordered, [], None
        apart = self._breakers.pairs.apart(now)
        return ordered, seconds, pair(ordered, seconds, self._compatible, apart)

    def _order(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        without: Collection[Worker],
        begin: Begin = _unheard,
    ) -> tuple[Ranked, list[Candidate], list[Candidate]]:
        """Prefills and decodes, best first; unified workers and nobody."""
        begin(Stage.POOL)
        prefills, decodes = self._fleet.sides(ask.model)
        begin(Stage.AVAILABILITY)
        tried = self._available(prefills, now, without)
        seconds = self._available(decodes, now, without) if decodes else ()
        begin(Stage.POLICY_INPUT)
        ranked = self._ranker.rank(ask.model, prompt, tried)
        begin(Stage.PAIR)
        need = Need(prompt.total or len(ask.raw) // BYTES_PER_TOKEN, _key(ask), self._chance)
        settings, ramping = self._fleet.settings, now < self._fleet.ramping_until
        first = candidates(tried, ranked.depths, settings, now, ramping)
        ordered = POLICIES[self._settings.prefill_policy](first, need)
        if not seconds:
            return ranked, ordered, []
        then = candidates(seconds, {}, settings, now, ramping)
        return ranked, ordered, POLICIES[self._settings.decode_policy](then, need)

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

    def _available(
        self, targets: Sequence[Target], now: float, without: Collection[Worker]
    ) -> Sequence[Target]:
        return available(targets, self._breakers, self._fleet.settings, now, without)

    def _dark(self, worker: Worker) -> bool:
        doubt = self._doubt(worker)
        return doubt is not None and doubt[0] is Knowledge.DARK

    def _made(
        self,
        ask: Ask,
        prefill: Target | None,
        decode: Target,
        ranked: Ranked,
        prompt: Prompt,
        alone: str = "",
    ) -> Choice:
        holder = prefill or decode
        knowledge, reason = self._knowledge(holder, prompt)
        return Choice(
            prefill,
            decode,
            ranked.depths.get(holder.worker, NOTHING),
            knowledge,
            reason,
            self._settings.prefill_policy,
            self._settings.decode_policy,
            ranked.candidates,
            prompt.total,
            None if prefill is None else self._view.epoch(prefill.worker),
            self._view.epoch(decode.worker),
            self._foretold(ask, holder, ranked, prompt),
            alone,
        )

    def _foretold(
        self, ask: Ask, holder: Target, ranked: Ranked, prompt: Prompt
    ) -> Foretold | None:
        """What is compared later. Samples of one prompt are counted by each engine its own way."""
        many = prompt.tokens is None or len(prompt.tokens) > MOST_RANKED or ask.samples > 1
        if many or not holder.up.events:
            return None
        facts = self._view.facts(holder.worker)
        size = ranked.sizes.get(holder.worker, ASSUMED_BLOCK)
        told, ranked_here = self._told(holder)[0], holder.worker in ranked.depths
        return Foretold(
            holder.worker,
            facts.epoch if facts else None,
            facts.last if facts else None,
            told is Knowledge.EXACT and ranked_here and not self._dark(holder.worker),
            Namespace(ranked.model, size, ranked.adapter, prompt.salt),
            prompt.tokens or (),
            ranked.depths,
        )

    def _knowledge(self, holder: Target, prompt: Prompt) -> tuple[Knowledge, str]:
        """The worse of what ingest wrote about this worker and our own checks, with its reason."""
        if not holder.up.events:
            return Knowledge.OFF, f"events of {holder.worker} are not configured"
        if prompt.tokens is None:
            text = REASONS.get(prompt.reason or "", prompt.reason or "no tokens")
            return Knowledge.DARK, text
        told, doubt = self._told(holder), self._doubt(holder.worker)
        if doubt is not None and WORSE.index(doubt[0]) >= WORSE.index(told[0]):
            return doubt  # of two that say as much, ours has seen it
        return told

    def _told(self, holder: Target) -> tuple[Knowledge, str]:
        """What ingest wrote, as long as the view can be believed."""
        if blind := self._blind():
            return Knowledge.DARK, blind
        known = self._view.known(holder.worker)
        if known is None:
            return Knowledge.DARK, f"{holder.worker} was never heard of"
        return known.state, "" if known.state is Knowledge.EXACT else known.reason


def _key(ask: Ask) -> str:
    """What consistent_hash sticks to: a routing key, else the user."""
    for name, value in ask.headers:
        if name == b"x-smg-routing-key":
            return value.decode("latin-1")
    user = ask.body.get("user")
    return user if isinstance(user, str) else ""

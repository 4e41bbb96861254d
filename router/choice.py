"""Choice: which prefill and which decode serve this request, and how well do we know?

Pure: view, fleet and circuits are looked at, time and chance are arguments; no await. gateway.py
asks per attempt, picker and decode-entry will ask too. Open it to change what a choice rests on.

    prompts -> chains per block size -> depth per worker -> prefill policy -> pair <- decode policy
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvplane.index import View, chain, rank
from kvplane.vocabulary import Epoch, Knowledge, Namespace, PrefixChain, Role, Stage, Worker

from .breaker import Breakers
from .errors import GatewayError
from .fleet import Fleet
from .foretold import Depth, Foretold
from .handoffs import HANDOFFS
from .pairing import Compatible, NoPair, Pair, pair
from .plans import REASONS, Prompt
from .policies import POLICIES, Candidate, Need
from .request import Ask
from .settings import RouterSettings
from .target import Target

WORSE = list(Knowledge)  # worst last
ASSUMED_BLOCK = 256  # tokens, where nobody tells a block size; few engines have larger ones
MOST_RANKED = 64  # prompts of a list that are ranked; more change no choice and cost the loop


@dataclass(frozen=True, slots=True)
class Choice:
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

    @property
    def holder(self) -> Target:
        """Whose cache was judged."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True)
class Ranked:
    """What the index says of the prompts, and how it was asked."""

    candidates: int  # targets that were ranked
    model: str = ""
    adapter: str = ""
    sizes: Mapping[Worker, int] = field(default_factory=dict)
    depths: Mapping[Worker, Depth] = field(default_factory=dict)


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
        self._turn, self._chain = 0, chain

    def choose(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        without: Collection[Worker] = (),
        begin: Begin = _unheard,
    ) -> Choice:
        """Raises GatewayError where nobody can serve. `begin` is told as each stage begins."""
        self._turn += 1
        ranked, ordered, seconds = self._order(ask, prompt, now, without, self._turn, begin)
        if not seconds:
            return self._made(ask, None, ordered[0].target, ranked, prompt)
        met = pair(ordered, seconds, self._compatible)
        if isinstance(met, NoPair):
            raise GatewayError(met.code, met.reason)
        if (engine := met.prefill.target.up.engine) not in HANDOFFS:
            known = ", ".join(sorted(HANDOFFS))
            raise GatewayError("no_compatible_pair", f"no hand-off for {engine}; known: {known}")
        return self._made(ask, met.prefill.target, met.decode.target, ranked, prompt)

    def weigh(self, ask: Ask, prompt: Prompt, now: float) -> Weighed:
        """What `choose` would go by now; takes nobody's turn. Raises GatewayError as it does."""
        _, ordered, seconds = self._order(ask, prompt, now, (), self._turn + 1)
        return ordered, seconds, pair(ordered, seconds, self._compatible) if seconds else None

    def _order(
        self,
        ask: Ask,
        prompt: Prompt,
        now: float,
        without: Collection[Worker],
        turn: int,
        begin: Begin = _unheard,
    ) -> tuple[Ranked, list[Candidate], list[Candidate]]:
        """Prefills and decodes, best first; unified workers and nobody."""
        begin(Stage.POOL)
        prefills, decodes = self._selectable(ask.model)
        begin(Stage.AVAILABILITY)
        tried = self._circuits(prefills, now, without)
        begin(Stage.POLICY_INPUT)
        ranked = self._rank(ask, prompt, tried)
        begin(Stage.PAIR)
        need = Need(prompt.total, _key(ask), turn, self._chance)
        policy = POLICIES[self._settings.prefill_policy]
        ordered = policy([_candidate(target, ranked.depths) for target in tried], need)
        if not decodes:
            return ranked, ordered, []
        seconds = [Candidate(target) for target in self._circuits(decodes, now, without)]
        return ranked, ordered, POLICIES[self._settings.decode_policy](seconds, need)

    def _selectable(self, model: str) -> tuple[Sequence[Target], Sequence[Target]]:
        """Prefills and decodes, or unified workers and nobody. Raises where there are none."""
        prefills = self._fleet.selectable(Role.PREFILL, model)
        decodes = self._fleet.selectable(Role.DECODE, model)
        unified = self._fleet.selectable(Role.BOTH, model)
        alone = not self._fleet.targets(Role.PREFILL) and not self._fleet.targets(Role.DECODE)
        if (unified and not (prefills and decodes)) or (alone and self._fleet.targets(Role.BOTH)):
            error = self._fleet.lack(Role.BOTH, model)
        else:
            error = self._fleet.lack(Role.PREFILL, model) or self._fleet.lack(Role.DECODE, model)
        if error is not None:
            raise error
        return (prefills, decodes) if prefills and decodes else (unified, ())

    def _circuits(
        self, targets: Sequence[Target], now: float, without: Collection[Worker]
    ) -> list[Target]:
        """Those whose circuit lets a request through; the guilty only where nobody else is left."""
        closed = [t for t in targets if self._breakers.admits(t.worker, now)]
        if not closed:
            role = targets[0].role
            side = "decode" if role is Role.DECODE else "prefill"
            wait = self._breakers.wait_s([target.worker for target in targets], now)
            raise GatewayError(
                f"no_{side}_available",
                f"every {role} worker failed too often lately; the next is tried in {wait:.0f} s",
                retry_after=f"{max(1, round(wait))}",
                at=Stage.AVAILABILITY,
            )
        return [t for t in closed if t.worker not in without] or closed

    def block_size(self, target: Target) -> int | None:
        """Tokens a block: as its events say, as declared, as configured."""
        seen = self._view.block_size(target.worker)
        return seen or target.up.block_size or self._settings.block_size

    def _rank(self, ask: Ask, prompt: Prompt, targets: Sequence[Target]) -> Ranked:
        """The depth of every target, over all prompts; none where tokens are not known. One whose
        stream our own check calls dark holds nothing that could be relied on."""
        if prompt.tokens is None:
            return Ranked(candidates=len(targets))
        models = {target.model for target in targets if target.model} or {ask.model}
        model = sorted(models)[0]
        adapter = prompt.adapter or (ask.model if ask.model not in (model, "") else "")
        judged = [t for t in targets if t.model in (model, "")]
        sizes = {t.worker: size for t in judged if (size := self.block_size(t))}
        names = [Namespace(model, size, adapter, prompt.salt) for size in set(sizes.values())]
        dark = {worker for worker in sizes if self._dark(worker)}
        found: dict[Worker, Depth] = {}
        for tokens in prompt.tokens[:MOST_RANKED]:
            chains = {name.block_size: self._chain(tokens, name) for name in names}
            for held in rank(self._view, chains, list(sizes)):
                before, size = found.get(held.worker, Depth()), sizes[held.worker]
                most = max(0, len(tokens) - 1) // size * size
                trusted = held.worker not in dark
                found[held.worker] = Depth(
                    before.blocks + held.depth_blocks * trusted,
                    before.asked + len(tokens) // size,
                    before.tokens + held.depth_tokens * trusted,
                    before.predicted + min(held.depth_tokens, most) * trusted,
                )
        return Ranked(len(targets), model, adapter, sizes, found)

    def _dark(self, worker: Worker) -> bool:
        doubt = self._doubt(worker)
        return doubt is not None and doubt[0] is Knowledge.DARK

    def _made(
        self, ask: Ask, prefill: Target | None, decode: Target, ranked: Ranked, prompt: Prompt
    ) -> Choice:
        holder = prefill or decode
        knowledge, reason = self._knowledge(holder, prompt)
        return Choice(
            prefill,
            decode,
            ranked.depths.get(holder.worker, Depth()),
            knowledge,
            reason,
            self._settings.prefill_policy,
            self._settings.decode_policy,
            ranked.candidates,
            prompt.total,
            None if prefill is None else self._view.epoch(prefill.worker),
            self._view.epoch(decode.worker),
            self._foretold(ask, holder, ranked, prompt),
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


def _candidate(target: Target, depths: Mapping[Worker, Depth]) -> Candidate:
    depth = depths.get(target.worker)
    return Candidate(target, depth.blocks, depth.tokens) if depth else Candidate(target)


def _key(ask: Ask) -> str:
    """What consistent_hash sticks to: a routing key, else the user."""
    for name, value in ask.headers:
        if name == b"x-smg-routing-key":
            return value.decode("latin-1")
    user = ask.body.get("user")
    return user if isinstance(user, str) else ""

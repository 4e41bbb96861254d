"""The index against an engine that is modelled as plainly as can be, over random streams.

never more    whatever engines do: copies, skipped caches, reports, blocks nobody told of, orders
equal         engines as they are: they evict leaves, and make copies of last blocks
alike         an ingest made anew from its rows before each batch goes on like one never stopped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.translating import Ingest, blocks_of, held_by, removed, stored

from kvplane.events import AllCleared, EngineEvent
from kvplane.events.translation import Limits
from kvplane.vocabulary import BlockHash, Tier

CPU = Tier.CPU
Prefix = tuple[int, ...]  # numbers of blocks; block n is the tokens n n n n
PROMPTS: list[Prefix] = [
    (1, 2), (1, 2, 3, 4), (1, 2, 3, 5), (1, 6), (7, 8, 9), (7, 2, 3), (1, 2, 3, 4, 5, 6), (8, 9),
]  # fmt: skip
ALONE: list[Prefix] = [(1,), (7,)]  # of one block: told again and again from the root


def tokens(prefix: Prefix) -> list[int]:
    return [number for number in prefix for _ in range(4)]


def block(prefix: Prefix) -> BlockHash:
    return blocks_of(tokens(prefix))[-1]


def name(prefix: Prefix) -> int:
    """The engine's hash."""
    return hash(prefix) & (1 << 64) - 1


@dataclass
class Engine:
    """Copies by prefix, and what it says."""

    gpu: Counter[Prefix] = field(default_factory=Counter)
    cpu: Counter[Prefix] = field(default_factory=Counter)
    seen: set[Prefix] = field(default_factory=set)  # since the cache was empty

    def serve(self, prompt: Prefix, skip: bool = False, report: bool = False) -> list[EngineEvent]:
        """Blocks that are there are read, but for the last; the others are made."""
        hit = 0
        while hit < len(prompt) - 1 and self.gpu[prompt[: hit + 1]]:
            hit += 1
        events = [self._store(prompt, 0, hit)] if report and hit else []
        hit = 0 if skip else hit
        for at in range(hit, len(prompt)):
            self.gpu[prompt[: at + 1]] += 1
            self.seen.add(prompt[: at + 1])
        return [*events, self._store(prompt, hit, len(prompt))]

    def silently(self, prompt: Prefix, most: int) -> None:
        """The first blocks came from elsewhere and nobody was told."""
        for at in range(min(most, len(prompt))):
            self.gpu[prompt[: at + 1]] += 1

    def _store(self, prompt: Prefix, first: int, last: int) -> EngineEvent:
        names = [name(prompt[: at + 1]) for at in range(first, last)]
        parent = name(prompt[:first]) if first else None
        return stored(names, tokens(prompt[first:last]), parent)

    def evict(self, number: int, leaves: bool) -> list[EngineEvent]:
        """One copy of one block goes."""
        held = sorted(+self.gpu)
        if leaves:
            held = [p for p in held if self.gpu[p] > 1 or not any(q[:-1] == p for q in held)]
        if not held:
            return []
        one = held[number % len(held)]
        self.gpu[one] -= 1
        return [removed(name(one))]

    def offload(self, number: int) -> list[EngineEvent]:
        """A block is copied to the host, told by name; the GPU may have dropped it just now."""
        seen = sorted(self.seen)
        if not seen:
            return []
        one = seen[number % len(seen)]
        self.cpu[one] += 1
        return [stored([name(one)], tier=CPU)]

    def unload(self, number: int) -> list[EngineEvent]:
        held = sorted(+self.cpu)
        if not held:
            return []
        one = held[number % len(held)]
        self.cpu[one] -= 1
        return [removed(name(one), tier=CPU)]

    def clear(self) -> list[EngineEvent]:
        self.gpu.clear()
        self.cpu.clear()
        self.seen.clear()
        return [AllCleared()]

    def truth(self, tier: Tier) -> set[BlockHash]:
        return {block(prefix) for prefix in +(self.gpu if tier is Tier.GPU else self.cpu)}


def apart(event: EngineEvent, order: int) -> list[EngineEvent]:
    """The blocks of one store, told one by one in some order."""
    names, ids, above = event.hashes, list(event.tokens), event.parent  # type: ignore[union-attr]
    found = []
    for at, one in enumerate(names):
        parent = names[at - 1] if at else above
        asked = [int.from_bytes(key[1:], "big") if key else None for key in (one, parent)]
        found.append(stored([asked[0]], ids[at * 4 : at * 4 + 4], asked[1]))  # type: ignore[list-item]
    for at in range(len(found) - 1, 0, -1):
        order, other = divmod(order, at + 1)
        found[at], found[other] = found[other], found[at]
    return found


NUMBER = st.integers(0, 5000)
USUAL = ("serve", "serve", "report", "evict", "evict", "offload", "unload", "clear")
WILD = (*USUAL, "skip", "alone", "silent", "apart", "evict any")
Step = tuple[str, int]


def plans(kinds: Sequence[str]) -> st.SearchStrategy[list[list[Step]]]:
    step = st.tuples(st.sampled_from(kinds), NUMBER)
    return st.lists(st.lists(step, min_size=1, max_size=4), max_size=25)


def act(engine: Engine, step: Step) -> list[EngineEvent]:
    """What the engine says when this happens to it."""
    kind, number = step
    prompt = PROMPTS[number % len(PROMPTS)]
    match kind:
        case "serve" | "report" | "skip":
            return engine.serve(prompt, skip=kind == "skip", report=kind == "report")
        case "alone":
            return engine.serve(ALONE[number % len(ALONE)])
        case "silent":
            engine.silently(prompt, 1 + number % 3)
            return []
        case "apart":
            (told,) = engine.serve(prompt)
            return apart(told, number)
        case "evict" | "evict any":
            return engine.evict(number, leaves=kind == "evict")
        case "offload":
            return engine.offload(number)
        case "unload":
            return engine.unload(number)
    return engine.clear()


@given(plan=plans(WILD))
def test_the_index_never_holds_more_than_the_engine(plan: list[list[Step]]) -> None:
    engine, ingest = Engine(), Ingest()
    for batch in plan:
        ingest.hear(*[event for step in batch for event in act(engine, step)])
        for tier in (Tier.GPU, CPU):
            assert ingest.blocks(tier) <= engine.truth(tier)
        for prefix in engine.seen:
            assert ingest.copies(name(prefix))[0] <= engine.gpu[prefix]


@given(plan=plans(USUAL))
def test_the_index_holds_what_the_engine_holds(plan: list[list[Step]]) -> None:
    engine, ingest = Engine(), Ingest()
    ingest.hear(*engine.serve(PROMPTS[0]), *engine.offload(0))
    for batch in plan:
        ingest.hear(*[event for step in batch for event in act(engine, step)])
        assert ingest.blocks() == engine.truth(Tier.GPU)
        assert ingest.blocks(CPU) == engine.truth(CPU)
        for prompt in PROMPTS:
            held = [
                any(c[prompt[: n + 1]] for c in (engine.gpu, engine.cpu))
                for n in range(len(prompt))
            ]
            depth = held.index(False) if False in held else len(held)
            assert ingest.depth(tokens(prompt)) == depth


# -- alike -----------------------------------------------------------------------------------

SMALL = Limits(
    most_blocks=12, most_aliases=5, most_waiting=6, most_waiting_bytes=90, waiting_s=30.0,
    waiting_batches=9, chunk_s=40.0,
)  # fmt: skip
KINDS = ["", "full_attention", "sliding_window", "mamba", "unknown"]


def oddity(random: Random) -> EngineEvent:
    """Events that fit together seldom: few names, any group, tier, size and parent."""
    names = random.choices(range(1, 10), k=random.randint(0, 4))
    tier = random.choice([Tier.GPU, Tier.GPU, CPU, Tier.REMOTE])
    group = random.choice([0, 0, 0, 1, 2])
    what = random.randint(0, 40)
    if what == 0:
        return AllCleared()
    if what < 16:
        return removed(*names, tier=tier, group=group)
    parent = random.choice([None, *range(1, 10)])
    size = random.choice([4, 4, 4, 8, 12])
    some = random.choice([0, 1, len(names), len(names), len(names), len(names) + 1])
    ids = [random.randint(1, 2)] * (some * size)
    facts = {
        "group": group,
        "kind": random.choice(KINDS),
        "window": random.choice([0, 8]),
        "extra": random.choice([(), (), (("img@0",),) * len(names)]),
        "paired": random.random() < 0.05,
    }
    return stored(names, ids, parent, size, tier, **facts)


def stream(seed: int) -> tuple[bool, Limits, list[tuple[list[EngineEvent], float]]]:
    """Whether copies are told, what is kept, and batches with the time that passed before each."""
    random = Random(seed)
    copies, limits = random.random() < 0.6, random.choice([SMALL, Limits()])
    batches: list[tuple[list[EngineEvent], float]] = []
    for _ in range(random.randint(1, 20)):
        events = [oddity(random) for _ in range(random.randint(0, 4))]
        batches.append((events, float(random.randint(0, 25))))
    return copies, limits, batches


SEED = st.integers(0, 1 << 32)


@settings(max_examples=300)
@given(seed=SEED)
def test_an_ingest_that_is_restarted_at_every_border_goes_on_alike(seed: int) -> None:
    copies, limits, batches = stream(seed)
    whole, forgets = (Ingest(copies=copies, limits=limits, forgets=each) for each in (False, True))
    now = 0.0
    for events, passed in batches:
        now += passed
        ours, theirs = whole.hear(*events, ts=now), forgets.hear(*events, ts=now)
        assert ours.changes == theirs.changes
        assert ours.rows == theirs.rows
        assert (ours.left_out, ours.waiting) == (theirs.left_out, theirs.waiting)
        assert ours.caveat == theirs.caveat == forgets.translator.caveat
        assert whole.table == forgets.table == whole.translator.table
        rows = whole.rows()
        assert sum(any(row.copies) for row in rows.values()) <= limits.most_blocks
        assert sum(not any(row.copies) for row in rows.values()) <= limits.most_aliases


@settings(max_examples=200)
@given(seed=SEED)
def test_what_the_changes_say_is_never_more_than_the_rows(seed: int) -> None:
    """Two names of one block (two lookaheads, two chunks): the first removal takes it away."""
    copies, limits, batches = stream(seed)
    ingest = Ingest(copies=copies, limits=limits)
    for events, passed in batches:
        ingest.hear(*events, ts=passed)
        rows = held_by(ingest.table)
        for place, blocks in ingest.held.items():
            assert blocks <= rows.get(place, set())

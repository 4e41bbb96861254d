"""Service: events over ZMQ in, POST /rank out, beside Dynamo's standalone indexer.

Needs an environment with ai-dynamo-runtime, named by DYNAMO_PY, for the ratios; without it there
are our figures alone. Both are told the same, asked the same in turns, and have to answer right,
every time. Fresh processes in every round; who comes first alternates. `x peer`: below 1 for times
means faster, above 1 for blocks/s. The peer takes nothing packed: beside that it is asked in JSON.

Whoever remembers prompts has of that what real traffic would give him. Engines hold what was routed
to them, so each conversation is asked for once, in the same form, before anything is timed. What is
timed then is prompts that nobody asked for: each begins like some conversation as far as that is
said to be held of it, and goes on with tokens that are new, in every pass.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bench.http_load import WrongAnswer, cpu_s
from bench.service_load import Load, Prompt
from bench.service_peers import Dynamo, Ours, Service
from bench.timing import Absent, Row

WORKERS, CONVERSATIONS, BLOCKS = 64, 400, 512  # of 8 k tokens: 200 k blocks are held
PROMPTS, PASSES, ROUNDS = 60, 5, 3
WAYS = ("hash", "packed hash", "tokens", "packed tokens")
MOST_S = 300.0  # for the last batch to be answerable

Values = dict[tuple[str, str, str], list[float]]  # service, what, unit -> one per round


def rows(
    workers: int = WORKERS,
    conversations: int = CONVERSATIONS,
    blocks: int = BLOCKS,
    passes: int = PASSES,
    rounds: int = ROUNDS,
) -> Iterator[Row | Absent]:
    """Blocks per second in; microseconds per question; with the peer's and the ratio."""
    values: Values = {}
    kinds: list[Callable[[int], Service]] = [Ours]
    if os.environ.get("DYNAMO_PY"):
        kinds.append(Dynamo)
    for number in range(rounds):
        load = Load(workers, conversations, blocks)
        with ExitStack() as stack:
            running = []
            for kind in kinds if number % 2 == 0 else kinds[::-1]:
                running.append(kind(workers))
                stack.callback(running[-1].stop)
            _round(values, load, running, passes)
    for (service, what, unit), found in values.items():
        yield Row(f"{service}, {what}", unit, tuple(found))
        theirs = values.get(("Dynamo", what, unit))
        if service == Ours.name and theirs:
            ratio = tuple(one / other for one, other in zip(found, theirs, strict=True))
            yield Row(f"  {what} / Dynamo's", "x peer", ratio)
    if len(kinds) == 1:
        yield Absent("service, Dynamo's figures", "DYNAMO_PY names no environment with it")


def _round(values: Values, load: Load, running: list[Service], passes: int) -> None:
    frames, marks = list(load.frames()), load.marks()
    frames += [frame for frame, _ in marks]
    for service in running:
        used, began = cpu_s(service.pid), time.perf_counter()
        for frame in frames:
            service.tell(frame)
        for (worker, _), tokens in marks:
            question = service.by_tokens(tokens)
            while worker not in service.depths(service.line.ask(question)):
                if time.perf_counter() - began > MOST_S:
                    raise WrongAnswer(f"{service.name} did not take in all within {MOST_S:g} s")
                time.sleep(0.02)
        took, used = time.perf_counter() - began, cpu_s(service.pid) - used
        _note(values, service, "ingest over ZMQ", "blocks/s", load.told / took)
        _note(values, service, "ingest over ZMQ, CPU of a block", "us", used / load.told * 1e6)
    for way in WAYS:
        _rank(values, way, load, running, passes)


def _rank(values: Values, way: str, load: Load, running: list[Service], passes: int) -> None:
    by = f"by_{way.replace(' ', '_')}"
    for one in load.conversations:  # routed once, or nobody would hold it
        for service in running:
            service.line.ask(getattr(service, by)(one.tokens))
    _ask(by, load.prompts(PROMPTS), running)  # a warm-up
    prompts = [prompt for _ in range(passes) for prompt in load.prompts(PROMPTS)]
    for service, (times, spent) in _ask(by, prompts, running).items():
        late = statistics.quantiles(times, n=100)[98]
        _note(values, service, f"rank by {way}, p50", "us", statistics.median(times))
        _note(values, service, f"rank by {way}, p99", "us", late)
        _note(values, service, f"rank by {way}, CPU", "us", spent / len(times))


def _ask(
    by: str, prompts: list[Prompt], running: list[Service]
) -> dict[Service, tuple[list[float], float]]:
    """Microseconds of each question, and of CPU in all; raises WrongAnswer."""
    asked = {
        service: [getattr(service, by)(prompt.tokens) for prompt in prompts] for service in running
    }
    times: dict[Service, list[float]] = {service: [] for service in running}
    answers: dict[Service, list[bytes]] = {service: [] for service in running}
    used = {service: cpu_s(service.pid) for service in running}
    for at in range(len(prompts)):
        for service in running if at % 2 else running[::-1]:
            began = time.perf_counter()
            answer = service.line.ask(asked[service][at])
            times[service].append((time.perf_counter() - began) * 1e6)
            answers[service].append(answer)
    spent = {service: (cpu_s(service.pid) - used[service]) * 1e6 for service in running}
    for service in running:
        for prompt, answer in zip(prompts, answers[service], strict=True):
            if (found := service.depths(answer)) != prompt.expected:
                raise WrongAnswer(f"{service.name} {by}: {found} for {prompt.expected}")
    return {service: (times[service], spent[service]) for service in running}


def _note(values: Values, service: Service, what: str, unit: str, value: float) -> None:
    values.setdefault((service.name, what, unit), []).append(value)
